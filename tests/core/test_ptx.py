"""The translation of PTX to C, on which test_kernels_compiled.py relies. Oracle: the PTX ISA."""

import ctypes

import ptx
import pytest
from ptx.translate import Unknown, as_c

HEAD = """.version 9.0
.target sm_90
.entry k(
.param .align 8 .b8 k_0[8]
)
{
.reg .pred %p<3>;
.reg .b16 %rs<3>;
.reg .b32 %r<3>;
.reg .f32 %f<3>;
.reg .b64 %rd<4>;
"""
ONE, NAN = "0d3FF0000000000000", "0d7FF8000000000000"
OF_16 = "cvt.u64.u16 %rd1, %rs1;"
OF_32 = "cvt.u64.u32 %rd1, %r1;"
IF = "selp.b64 %rd1, 1, 0, %p1;"

# what a program leaves in %rd1
RESULTS = {
    "mov.u32 %r2, -8;\nshr.s32 %r1, %r2, 40;\n" + OF_32: 0xFFFFFFFF,
    "shr.u32 %r1, -8, 40;\n" + OF_32: 0,
    "shr.s32 %r1, -8, 1;\n" + OF_32: 0xFFFFFFFC,
    "shl.b32 %r1, 3, 31;\n" + OF_32: 0x80000000,
    "shl.b64 %rd1, 3, 64;": 0,
    "bfi.b64 %rd1, 5, -1, 4, 3;": 2**64 - 1 - 0x20,
    "bfi.b64 %rd1, 5, 9, 64, 3;": 9,
    "sub.s32 %r1, 0, 1;\n" + OF_32: 0xFFFFFFFF,
    "mul.lo.s32 %r1, -3, 5;\n" + OF_32: 2**32 - 15,
    "mul.wide.u32 %rd1, -1, -1;": (2**32 - 1) ** 2,
    "mad.lo.s64 %rd1, -2, 5, 1;": 2**64 - 9,
    "div.u32 %r1, -1, 16;\n" + OF_32: (2**32 - 1) // 16,
    "not.b32 %r1, 5;\n" + OF_32: 2**32 - 6,
    "min.s64 %rd1, -1, 1;": 2**64 - 1,
    "max.s64 %rd1, -1, 1;": 1,
    "setp.lt.s32 %p1, -1, 1;\n" + IF: 1,
    "setp.lt.u32 %p1, -1, 1;\n" + IF: 0,
    "setp.gt.s16 %p1, -1, 1;\n" + IF: 0,
    f"setp.nan.f64 %p1, {ONE}, {NAN};\n{IF}": 1,
    f"setp.neu.f64 %p1, {NAN}, {NAN};\n{IF}": 1,
    f"setp.lt.f64 %p1, {NAN}, {ONE};\n{IF}": 0,
    f"setp.eq.f64 %p1, {ONE}, {ONE};\n{IF}": 1,
    "mov.pred %p2, -1;\nnot.pred %p1, %p2;\nor.pred %p1, %p1, %p2;\n" + IF: 1,
    "mov.pred %p2, 0;\nmov.pred %p1, -1;\nand.pred %p1, %p1, %p2;\n" + IF: 0,
    "mov.u64 %rd1, 7;\nmov.pred %p1, -1;\n@%p1 bra $after;\nmov.u64 %rd1, 8;\n$after:": 7,
    "mov.b64 {%r2, %r1}, 0x1111111122222222;\n" + OF_32: 0x11111111,
    "{ .reg .b16 tmp; mov.b32 {tmp, %rs1}, 0x11112222; }\n" + OF_16: 0x1111,
    "mov.u32 %r1, 1;\nmov.u32 %r2, 2;\nmov.b64 %rd1, {%r1, %r2};": 2 << 32 | 1,
    "cvt.u16.u64 %rs1, 0x12345;\n" + OF_16: 0x2345,
    "cvt.rn.f16.f32 %rs1, 0f477FF000;\n" + OF_16: 0x7C00,  # 65520: half way to what would be 65536
    "cvt.rn.f16.f32 %rs1, 0fC77FEFFF;\n" + OF_16: 0xFBFF,
    "cvt.rn.f16.f32 %rs1, 0f33000000;\n" + OF_16: 0,  # half of the smallest
    "cvt.rn.f16.f32 %rs1, 0f33000001;\n" + OF_16: 1,
    "cvt.rn.bf16.f32 %rs1, 0f3F808000;\n" + OF_16: 0x3F80,  # half way, to even
    "cvt.rn.bf16.f32 %rs1, 0f3F818000;\n" + OF_16: 0x3F82,
    "cvt.rn.bf16.f32 %rs1, 0f7F7FFFFF;\n" + OF_16: 0x7F80,
    "mov.u16 %rs1, 0x8001;\ncvt.f32.f16 %f1, %rs1;\nmov.b32 %r1, %f1;\n" + OF_32: 0xB3800000,
    "mov.u16 %rs1, 0x7C00;\ncvt.f32.f16 %f1, %rs1;\nmov.b32 %r1, %f1;\n" + OF_32: 0x7F800000,
}


class Entry(ctypes.Structure):
    """ptx_entry."""

    _fields_ = [("name", ctypes.c_char_p), ("kernel", ctypes.c_void_p)]
    _fields_ += [(name, ctypes.c_size_t) for name in ("argument_bytes", "shared_bytes")]
    _fields_ += [("has_barriers", ctypes.c_int)]


def launched(folder, lines, memory, blocks=1, threads=1):
    """Whether a kernel of these lines runs, in both orders of threads and blocks. %rd3: the address of the memory."""
    lines = ["ld.param.u64 %rd2, [k_0];", "cvta.to.global.u64 %rd3, %rd2;", *lines, "ret;", "}", ""]
    text, program = HEAD + "\n".join(lines), folder / "k.ptx"
    program.write_text(text)
    library = ptx.library(program)
    entry = Entry.in_dll(library, "ptx_entries")
    shared_bytes = 4 if "\n.shared" in text else 0
    assert (entry.name, entry.argument_bytes, entry.shared_bytes) == (b"k", 8, shared_bytes)
    assert entry.has_barriers == ("bar.sync" in text)
    found = []
    for _ in range(2):
        ctypes.memset(memory, 0, ctypes.sizeof(memory))
        pointer = ctypes.c_void_p(ctypes.addressof(memory))
        found.append(library.ptx_launch(ctypes.byref(entry), blocks, threads, ctypes.byref(pointer), 1))
    return found == [0, 0]


@pytest.mark.multiprocess
def test_results(tmp_path):
    lines = []
    for i, program in enumerate(RESULTS):
        lines += [program.replace("$after", f"$after{i}"), f"st.global.u64 [%rd3+{8 * i}], %rd1;"]
    results = (ctypes.c_uint64 * len(RESULTS))()
    assert launched(tmp_path, lines, results)
    assert dict(zip(RESULTS, results, strict=True)) == RESULTS


# The second thread of each block writes to the block's place; in the block that is last all threads read those of both.
MEETING = """.shared .align 4 .b8 last[4];
mov.u32 %r1, %tid.x;
setp.eq.s32 %p1, %r1, 1;
mov.u32 %r2, %ctaid.x;
mul.wide.u32 %rd1, %r2, 4;
add.s64 %rd2, %rd3, %rd1;
@%p1 st.global.u32 [%rd2+8], %r2;
bar.sync 0; // tells the first
setp.ne.s32 %p1, %r1, 0;
@%p1 bra $others;
membar.gl; // publishes
atom.global.add.u32 %r1, [%rd3], 1; // counts
membar.gl; // sees
mov.u64 %rd1, last;
st.shared.u32 [%rd1], %r1;
$others:
bar.sync 0; // tells the block
membar.gl; // once more, which changes nothing
mov.u64 %rd1, last;
ld.shared.u32 %r1, [%rd1];
setp.eq.s32 %p2, %r1, 0;
@%p2 bra $end;
ld.global.u32 %r1, [%rd3+8];
ld.global.u32 %r2, [%rd3+12];
$end:"""
WITHOUT = ["tells the first", "publishes", "sees", "tells the block"]
INSTEAD = {
    "a fence before the barrier": (
        "bar.sync 0; // tells the first",
        "membar.gl;\nbar.sync 0;",
        "membar.gl; // publishes\n",
    ),
    "another counter for each block": (
        "atom.global.add.u32 %r1, [%rd3], 1;",
        "atom.global.add.u32 %r1, [%rd2], 1;",
        "",
    ),
}


@pytest.mark.multiprocess
@pytest.mark.parametrize("lacks", [*WITHOUT, *INSTEAD, None])
def test_blocks_that_meet(tmp_path, capfd, lacks):
    old, new, left_out = INSTEAD.get(lacks, ("", "", ""))
    lines = MEETING.replace(old, new).replace(left_out, "") if lacks in INSTEAD else MEETING
    lines = [line for line in lines.split("\n") if lacks not in WITHOUT or not line.endswith(lacks)]
    memory = (ctypes.c_uint32 * 4)()
    if lacks == "another counter for each block":  # so that both read
        lines = [line for line in lines if not line.startswith("@%p2")]
    assert launched(tmp_path, lines, memory, blocks=2, threads=3) == (lacks is None)
    assert ("race: the first" in capfd.readouterr().err) == (lacks is not None)


READERS = """mov.u32 %r1, %ctaid.x;
setp.ne.s32 %p1, %r1, 0;
ld.global.u32 %r2, [%rd3];
bar.sync 0;
mov.u32 %r1, %tid.x;
setp.ne.s32 %p2, %r1, 0;
@%p2 bra $end;
@%p1 st.global.u32 [%rd3], %r2;
$end:"""


@pytest.mark.multiprocess
def test_readers_of_another_block_are_remembered(tmp_path):
    assert launched(tmp_path, READERS.split("\n"), (ctypes.c_uint32 * 4)(), blocks=1, threads=3)
    assert not launched(tmp_path, READERS.split("\n"), (ctypes.c_uint32 * 4)(), blocks=2, threads=3)


# %rd2 is each thread's own place; the first thread has no %p1
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("access", "races"),
    [
        ("ld.global.u32 %r2, [%rd3];", False),
        ("st.global.u32 [%rd3], %r1;", True),
        ("st.global.u32 [%rd2], %r1;", False),
        ("ld.global.u32 %r2, [%rd3];\n@%p1 bra $end;\nst.global.u32 [%rd3], %r1;\n$end:", True),
        ("ld.global.u32 %r2, [%rd2];\nst.global.u32 [%rd2], %r1;", False),
        ("ld.global.u32 %r2, [%rd2];\nst.global.u32 [%rd2+8], %r1;", True),
        ("atom.global.add.u32 %r1, [%rd3], 1;", False),
        ("atom.global.add.u32 %r1, [%rd3], 1;\nld.global.u32 %r2, [%rd3];", True),
    ],
)
def test_threads_that_use_the_same_memory(tmp_path, access, races):
    own = "mov.u32 %r1, %tid.x;\nsetp.ne.s32 %p1, %r1, 0;\nmul.wide.u32 %rd1, %r1, 8;\nadd.s64 %rd2, %rd3, %rd1;"
    assert launched(tmp_path, [own, access], (ctypes.c_uint64 * 8)(), threads=3) != races


@pytest.mark.parametrize(
    "instruction",
    [
        "fma.rn.f32 %f1, %f1, %f1, %f1;",
        "mul.f32 %f1, %f1, %f1;",  # may become a part of a multiply-add
        "add.rz.f32 %f1, %f1, %f1;",
        "add.rn.ftz.f32 %f1, %f1, %f1;",
        "add.f16 %rs1, %rs1, %rs1;",
        "min.f32 %f1, %f1, %f1;",
        "div.s32 %r1, %r1, %r1;",
        "mul.wide.s32 %rd1, %r1, %r1;",
        "setp.ne.f64 %p1, %rd1, %rd1;",
        "cvt.rz.bf16.f32 %rs1, %f1;",
        "cvt.rn.f16.f64 %rs1, %rd1;",
        "cvt.f16.u16 %rs1, %rs1;",
        "cvt.s64.s32 %rd1, %r1;",
        "cvt.sat.f32.f16 %f1, %rs1;",
        "mov.b32 %r1, {%rs1, 0};",
        "shfl.sync.bfly.b32 %r1, %r1, 1, 31, -1;",
        "ld.local.u32 %r1, [%rd1];",
        "ld.global.s16 %r1, [%rd1];",
        "ld.global.v2.u32 %r1, [%rd1];",
        "st.param.u32 [%rd1], %r1;",
        "atom.global.add.f32 %f1, [%rd1], %f1;",
        "bar.sync 1;",
        "}",  # and what follows
    ],
)
def test_what_has_no_translation_is_refused(instruction):
    as_c(HEAD + "add.s32 %r1, %r1, 1;\nret;\n}\n")
    with pytest.raises(Unknown):
        as_c(HEAD + instruction + "\nadd.s32 %r1, %r1, 1;\nret;\n}\n")

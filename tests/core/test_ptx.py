"""The translation of PTX that test_kernels_compiled.py trusts."""

import pytest
from ptx.translate import Unknown, as_c


@pytest.mark.parametrize(
    "instruction",
    [
        "fma.rn.f32 %f1, %f1, %f1, %f1;",
        "mul.f32 %f1, %f1, %f1;",  # may become a part of a multiply-add
        "add.rz.f32 %f1, %f1, %f1;",
        "add.rn.ftz.f32 %f1, %f1, %f1;",
        "min.f32 %f1, %f1, %f1;",
        "cvt.rz.bf16.f32 %r1, %f1;",
        "cvt.rn.f16.f64 %r1, %f1;",
        "shfl.sync.bfly.b32 %r1, %r1, 1, 31, -1;",
        "ld.local.u32 %r1, [%r1];",
        "ld.global.v2.u32 %r1, [%r1];",
        "atom.global.add.f32 %f1, [%r1], %f1;",
        "bar.sync 1;",
    ],
)
def test_instructions_that_have_no_translation_are_refused(instruction):
    text = "\n".join([".entry k(", ".param .align 16 .b8 k_0[16]", ")", "{", ".reg .f32 %f<2>;", instruction, "}"])
    with pytest.raises(Unknown, match=instruction.split(".")[0]):
        as_c(text)

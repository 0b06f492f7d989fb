"""PTX as C: what nvcc makes of a kernel, for a compiler of the host.

Each instruction becomes a statement, and each register 64 bits. What is not known here is refused, with ``Unknown``.
Source: the PTX ISA, release 9.0.
"""

import re

LOGIC = {"and": "&", "or": "|"}
ARITHMETIC = {"add": "+", "sub": "-", "mul": "*"}
QUOTIENTS = {"div": "/", "rem": "%"}
COMPARED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
SPECIAL = {"%tid.x": "self->thread", "%ctaid.x": "self->block", "%nctaid.x": "self->blocks"}
FLOATS = ("f32", "f64")
BITS = {f"{kind}{bits}": bits for kind in "bsu" for bits in (8, 16, 32, 64)} | {"f32": 32, "f64": 64}


class Unknown(Exception):
    """Something that has no translation here."""


def require(is_known):
    if not is_known:
        raise ValueError


def wrapping(kind):
    """The type to compute with: what has a sign, or is just bits, as unsigned, so that it wraps around."""
    require(kind in BITS)
    return kind if kind in FLOATS else f"u{kind[1:]}"


def is_unsigned(kind):
    return kind in BITS and kind[0] == "u"


class Kernel:
    """One ``.entry``: its name, the bytes of its arguments and of its shared memory, and its C."""

    def __init__(self, name, argument, body):
        self.name = name
        found = re.fullmatch(r"\s*\.param \.align \d+ \.b8 (\w+)\[(\d+)\]\s*", argument)
        if found is None:
            raise Unknown(argument)
        self.argument, self.argument_bytes = found.groups()
        self.shared, self.shared_bytes, self.has_barriers = {}, 0, False
        registers, lines = [], []
        for line in re.sub(r"//[^\n]*", "", body).split("\n"):
            line = line.strip()
            if declared := re.fullmatch(r"\.reg \.\w+\s+%(\w+)<(\d+)>;", line):
                registers += [f"{declared[1]}{i}" for i in range(1, int(declared[2]))]
            elif declared := re.fullmatch(r"\.shared \.align (\d+) \.[bu]8 (\w+)(?:\[(\d+)\])?;", line):
                self.shared_bytes += -self.shared_bytes % int(declared[1])
                self.shared[declared[2]] = self.shared_bytes
                self.shared_bytes += int(declared[3] or 1)
            elif label := re.fullmatch(r"\$(\w+):", line):
                lines.append(f"{label[1]}:;")
            elif line and not line.startswith(".pragma"):
                lines.append(f"    {self.statement(line)}")
        declarations = [f"    uint64_t {register} = NONSENSE;" for register in registers]
        self.c = "\n".join([f"static void\n{name}(const ptx_thread *self)\n{{", *declarations, *lines, "}\n"])

    def statement(self, line):
        """The C of an instruction, ``[@%p] name.part.type operand, ...;``."""
        line = re.sub(r"\{ \.reg \.b\d+ tmp; (.*) \}", lambda inner: inner[1].replace("tmp", "_"), line)
        found = re.fullmatch(r"(?:@%(\w+)\s+)?([a-z][\w.]*)\s*([^;]*);", line)
        if found is None:
            raise Unknown(line)
        predicate, instruction, rest = found.groups()
        operands = re.findall(r"\{[^}]*\}|\[[^]]*\]|[^\s,]+", rest)
        name, *parts = instruction.split(".")
        translate = getattr(self, f"put_{name}", None)
        try:
            done = translate(parts, *operands) if translate else self.computed(name, parts, *operands)
        except (TypeError, KeyError, ValueError, IndexError) as error:
            raise Unknown(line) from error
        return f"if ({predicate}) {{ {done} }}" if predicate else done

    # Operands

    def raw(self, operand):
        """A register or a number as 64 bits."""
        if operand in SPECIAL:
            return SPECIAL[operand]
        if operand.startswith("%"):
            return operand[1:]
        if operand == self.argument:
            return "(uint64_t)(uintptr_t)self->arguments"
        if operand in self.shared:
            return str(self.shared[operand])
        if number := re.fullmatch(r"0[dDfF]([0-9A-F]+)", operand):
            return f"UINT64_C(0x{number[1]})"
        return f"(uint64_t)INT64_C({int(operand, 0)})"

    def read(self, operand, kind):
        require(kind in BITS)
        return f"get_{kind}({self.raw(operand)})"

    def write(self, operand, kind, value):
        require(kind in BITS and operand.startswith("%"))
        return f"{operand[1:]} = put_{kind}({value});"

    def address(self, operand, space, size, access):
        base, _, offset = operand.strip("[]").partition("+")
        if space == "shared":  # 32 bits, from the start of the block's
            there = f"(uint64_t)(uintptr_t)self->shared + (uint32_t)({self.raw(base)} + {int(offset or 0)})"
        else:
            there = f"{self.raw(base)} + (uint64_t)INT64_C({int(offset or 0)})"
        return f"ptx_at(self, {there}, {size}, {access})"

    # Instructions

    def computed(self, name, parts, to, a, b):
        """What C has an operator for."""
        *rounding, kind = parts
        if kind == "pred":
            require(not rounding)
            return f"{to[1:]} = ({self.raw(a)} != 0) {LOGIC[name]} ({self.raw(b)} != 0);"
        if name in QUOTIENTS:
            require(is_unsigned(kind) and not rounding)
            operator = QUOTIENTS[name]
        elif name in LOGIC:
            require(kind[0] == "b" and not rounding)
            operator, kind = LOGIC[name], wrapping(kind)
        else:  # of floats, what is not said to be rounded may become a part of a multiply-add
            require(rounding == (["rn"] if kind in FLOATS else ["lo"] if name == "mul" else []))
            operator, kind = ARITHMETIC[name], wrapping(kind)
        return self.write(to, kind, f"{self.read(a, kind)} {operator} {self.read(b, kind)}")

    def put_mul(self, parts, to, a, b):
        if parts[0] != "wide":
            return self.computed("mul", parts, to, a, b)
        require(parts == ["wide", "u32"])
        return self.write(to, "u64", f"(uint64_t){self.read(a, 'u32')} * {self.read(b, 'u32')}")

    def put_mad(self, parts, to, a, b, c):
        rounding, kind = parts
        require(rounding == "lo" and kind not in FLOATS)
        kind = wrapping(kind)
        return self.write(to, kind, f"{self.read(a, kind)} * {self.read(b, kind)} + {self.read(c, kind)}")

    def put_neg(self, parts, to, a):
        (kind,) = parts
        require(kind in FLOATS or kind[0] == "s")
        return self.write(to, kind, f"-{self.read(a, kind)}")

    def put_not(self, parts, to, a):
        (kind,) = parts
        if kind == "pred":
            return f"{to[1:]} = !{self.raw(a)};"
        kind = wrapping(kind)
        require(kind not in FLOATS)
        return self.write(to, kind, f"~{self.read(a, kind)}")

    def put_min(self, parts, to, a, b):
        return self.chosen("<", parts, to, a, b)

    def put_max(self, parts, to, a, b):
        return self.chosen(">", parts, to, a, b)

    def chosen(self, order, parts, to, a, b):
        (kind,) = parts
        require(kind not in FLOATS)
        a, b = self.read(a, kind), self.read(b, kind)
        return self.write(to, kind, f"{a} {order} {b} ? {a} : {b}")

    def put_shl(self, parts, to, a, by):
        (kind,) = parts
        require(kind[0] == "b")
        kind = wrapping(kind)
        return self.write(to, kind, f"PTX_SHL({BITS[kind]}, {self.read(a, kind)}, {self.read(by, 'u32')})")

    def put_shr(self, parts, to, a, by):
        (kind,) = parts
        require(kind not in FLOATS)
        kind = kind if kind[0] == "s" else wrapping(kind)
        return self.write(to, kind, f"PTX_SHR({BITS[kind]}, {self.read(a, kind)}, {self.read(by, 'u32')})")

    def put_bfi(self, parts, to, a, b, at, n):
        require(parts == ["b64"])
        values = [self.read(a, "u64"), self.read(b, "u64"), self.read(at, "u32"), self.read(n, "u32")]
        return self.write(to, "u64", f"ptx_bfi({', '.join(values)})")

    def put_setp(self, parts, to, a, b):
        how, kind = parts
        is_float = kind in FLOATS
        kind = wrapping(kind) if kind[0] == "b" else kind
        a, b = self.read(a, kind), self.read(b, kind)
        if how in ("nan", "neu"):
            require(is_float)
            value = f"isunordered({a}, {b})" if how == "nan" else f"!({a} == {b})"
        else:
            require(how != "ne" or not is_float)  # that of floats is false for NaN, C's is true
            value = f"{a} {COMPARED[how]} {b}"
        return f"{to[1:]} = {value};"

    def put_selp(self, parts, to, a, b, predicate):
        (kind,) = parts
        kind = wrapping(kind)
        return self.write(to, kind, f"{self.raw(predicate)} ? {self.read(a, kind)} : {self.read(b, kind)}")

    def put_cvt(self, parts, to, a):
        if parts == ["f32", "f16"]:
            return self.write(to, "f32", f"ptx_widen_f16({self.read(a, 'u16')})")
        if parts in (["rn", "f16", "f32"], ["rn", "bf16", "f32"]):
            form = "10, -14" if parts[1] == "f16" else "7, -126"
            return self.write(to, "u16", f"ptx_narrow({self.read(a, 'f32')}, {form})")
        if parts == ["rn", "f32", "f64"]:
            return self.write(to, "f32", f"(float){self.read(a, 'f64')}")
        if parts == ["rn", "f32", "u32"]:
            return self.write(to, "f32", f"(float){self.read(a, 'u32')}")
        if parts == ["rzi", "u32", "f32"]:  # it saturates, and a NaN becomes 0; C has no value then
            value = self.read(a, "f32")
            whole = f"{value} < 4294967296.0f ? (uint32_t){value} : UINT32_MAX"
            return self.write(to, "u32", f"({value} > 0.0f ? ({whole}) : 0u)")
        kind, source = parts
        require((kind, source) == ("f64", "f32") or (is_unsigned(kind) and is_unsigned(source)))
        return self.write(to, kind, self.read(a, source))

    def put_cvta(self, parts, to, a):
        require(parts == ["to", "global", "u64"])
        return self.write(to, "u64", self.read(a, "u64"))

    def put_mov(self, parts, to, a):
        (kind,) = parts
        if kind == "pred":
            return f"{to[1:]} = {self.raw(a)} != 0;"
        kind = wrapping(kind)
        if to[0] == "{":  # taken apart, the low part first
            into = self.registers(to)
            width, whole = BITS[kind] // len(into), self.read(a, kind)
            shifted = [(part, f"(uint{width}_t)({whole} >> {i * width})") for i, part in enumerate(into)]
            return " ".join(self.write(part, f"u{width}", value) for part, value in shifted if part != "_")
        if a[0] == "{":
            parts = self.registers(a)
            width = BITS[kind] // len(parts)
            joined = [f"(uint64_t){self.read(part, f'u{width}')} << {i * width}" for i, part in enumerate(parts)]
            return self.write(to, kind, " | ".join(joined))
        return self.write(to, kind, self.read(a, kind))

    def registers(self, vector):
        parts = re.split(r"\s*,\s*", vector.strip("{}"))
        require(len(parts) in (2, 4) and all(re.fullmatch(r"%\w+|_", part) for part in parts))
        return parts

    def accessed(self, parts, spaces, values):
        """The space, the single values, and the bytes of each, for ``ld`` and ``st``."""
        space, *vector, kind = (part for part in parts if part != "volatile")
        values = self.registers(values) if vector else [values]
        require(space in spaces and vector in ([], ["v2"]) and len(values) == (2 if vector else 1))
        require(BITS[kind] >= 8 and kind[0] != "s")
        return space, values, BITS[kind] // 8

    def put_ld(self, parts, to, address):
        space, into, size = self.accessed(parts, ("param", "global", "shared"), to)
        loads = [f"{one[1:]} = 0; memcpy(&{one[1:]}, from + {i * size}, {size});" for i, one in enumerate(into)]
        there = self.address(address, space, len(into) * size, "PTX_READ")
        return f"{{ const unsigned char *from = {there}; {' '.join(loads)} }}"

    def put_st(self, parts, address, values):
        space, values, size = self.accessed(parts, ("global", "shared"), values)
        stores = [f"value = {self.raw(one)}; memcpy(at + {i * size}, &value, {size});" for i, one in enumerate(values)]
        at = self.address(address, space, len(values) * size, "PTX_WRITE")
        return f"{{ unsigned char *at = {at}; uint64_t value; {' '.join(stores)} }}"

    def put_atom(self, parts, to, address, a):
        require(parts == ["global", "add", "u32"])
        there = self.address(address, "global", 4, "PTX_ATOMIC")
        return self.write(to, "u32", f"ptx_add({there}, {self.read(a, 'u32')})")

    def put_bar(self, parts, barrier):
        require((parts, barrier) == (["sync"], "0"))
        self.has_barriers = True
        return "ptx_barrier();"

    def put_membar(self, parts):
        require(parts == ["gl"])
        return "ptx_fence(self);"

    def put_bra(self, parts, label):
        require(parts in ([], ["uni"]))
        return f"goto {label.removeprefix('$')};"

    def put_ret(self, parts):
        require(not parts)
        return "return;"


def kernels_of(text):
    """All kernels of a module, of which nothing but directives is left out."""
    entry = r"\.entry (\w+)\(\n(.*)\n\)\n(?:\.\w+ .*\n)*\{\n((?:.*\n)*?)\n?\}\n"
    left_out = re.sub(r"//.*", "", re.sub(entry, "", text)).split("\n")
    for line in left_out:
        if line.strip() and not re.fullmatch(r"\.(version|target|address_size) .*", line.strip()):
            raise Unknown(line)
    return [Kernel(*found) for found in re.findall(entry, text)]


def as_c(text):
    """The C of all kernels, and a table of them."""
    kernels = kernels_of(text)
    rows = [f'    {{"{k.name}", {k.name}, {k.argument_bytes}, {k.shared_bytes}, {k.has_barriers:d}}},' for k in kernels]
    table = ["const ptx_entry ptx_entries[] = {", *rows, "    {0},", "};", ""]
    return "\n".join(['#include "ptx.h"\n', *(kernel.c for kernel in kernels), *table])

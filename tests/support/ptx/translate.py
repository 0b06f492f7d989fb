"""PTX as C: what nvcc makes of a kernel, for a compiler of the host.

Each instruction becomes a statement, and each register 64 bits. Instructions that are not known here are refused.
Source: the PTX ISA, release 9.0.
"""

import re

LOGIC = {"and": "&", "or": "|", "xor": "^"}
ARITHMETIC = {"add": "+", "sub": "-", "mul": "*", "div": "/", "rem": "%"}
COMPARED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
SPECIAL = {"%tid.x": "self->thread", "%ctaid.x": "self->block", "%nctaid.x": "self->blocks"}
FLOATS = ("f64", "f32")


class Unknown(Exception):
    """An instruction that has no translation here."""


def bits_of(kind):
    return int(kind[1:])


def unsigned(kind):
    """The type to compute with: what has a sign, or is just bits, as unsigned, so that it wraps around."""
    return kind if kind in FLOATS else f"u{kind[1:]}"


class Kernel:
    """One ``.entry``: its name, the bytes of its arguments and shared memory, and its C."""

    def __init__(self, name, argument, body):
        self.name = name
        self.argument, self.argument_bytes = re.fullmatch(r"\s*\.param .*\.b8 (\w+)\[(\d+)\]\s*", argument).groups()
        self.shared, self.shared_bytes = {}, 0
        registers, lines = [], []
        for line in re.sub(r"//[^\n]*", "", body).replace("{\n", "\n").split("\n"):
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
        self.c = "\n".join(
            [
                f"static void\n{name}(const ptx_thread *self)\n{{",
                *[f"    uint64_t {name} = NONSENSE;" for name in registers],
                *lines,
                "}\n",
            ]
        )

    def statement(self, line):
        """The C of an instruction, ``[@[!]%p] name.part.type operand, ...;``."""
        line = re.sub(r"\{ \.reg \.b\d+ tmp; (.*) \}", lambda inner: inner[1].replace("tmp", "_"), line)
        found = re.fullmatch(r"(?:@(!?)%(\w+)\s+)?([a-z][\w.]*)\s*(.*);", line)
        if found is None:
            raise Unknown(line)
        negated, predicate, instruction, rest = found.groups()
        operands = re.findall(r"\{[^}]*\}|\[[^]]*\]|[^\s,]+", rest)
        name, *parts = instruction.split(".")
        translate = getattr(self, f"put_{name}", None)
        try:
            done = translate(parts, *operands) if translate else self.computed(name, parts, *operands)
        except (TypeError, KeyError, ValueError, IndexError) as error:
            raise Unknown(line) from error
        return f"if ({'!' if negated else ''}{predicate}) {{ {done} }}" if predicate else done

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
        return f"get_{kind}({self.raw(operand)})"

    def write(self, operand, kind, value):
        return f"{operand.removeprefix('%')} = put_{kind}({value});"

    def address(self, operand, space, size):
        base, _, offset = operand.strip("[]").partition("+")
        if space == "shared":  # 32 bits, from the start of the block's
            there = f"(uint64_t)(uintptr_t)self->shared + (uint32_t)({self.raw(base)} + {int(offset or 0)})"
        else:
            there = f"{self.raw(base)} + (uint64_t)INT64_C({int(offset or 0)})"
        return f"ptx_at({there}, {size})"

    # Instructions

    def computed(self, name, parts, to, *operands):
        kind, rounding = parts[-1], parts[:-1]
        if kind == "pred":
            a, b = map(self.raw, operands)
            return f"{to[1:]} = {a} {LOGIC[name]} {b};"
        allowed = ["rn"] if kind in FLOATS else ["lo"] if name == "mul" else []  # unrounded ones may be contracted
        if rounding != allowed or (name in ("div", "rem") and kind in FLOATS):
            raise ValueError
        operator = LOGIC[name] if name in LOGIC else ARITHMETIC[name]
        kind = kind if name in ("div", "rem") else unsigned(kind)
        a, b = (self.read(operand, kind) for operand in operands)
        return self.write(to, kind, f"{a} {operator} {b}")

    def put_mul(self, parts, to, a, b):
        if parts[0] != "wide":
            return self.computed("mul", parts, to, a, b)
        kind = parts[1]
        wide = f"{kind[0]}{2 * bits_of(kind)}"
        return self.write(to, wide, f"(uint64_t){self.read(a, kind)} * (uint64_t){self.read(b, kind)}")

    def put_mad(self, parts, to, a, b, c):
        rounding, kind = parts
        if rounding != "lo":
            raise ValueError
        kind = unsigned(kind)
        a, b, c = (self.read(operand, kind) for operand in (a, b, c))
        return self.write(to, kind, f"{a} * {b} + {c}")

    def put_neg(self, parts, to, a):
        (kind,) = parts
        return self.write(to, kind, f"-{self.read(a, kind)}")

    def put_not(self, parts, to, a):
        if parts == ["pred"]:
            return f"{to[1:]} = !{self.raw(a)};"
        kind = unsigned(parts[0])
        return self.write(to, kind, f"~{self.read(a, kind)}")

    def put_min(self, parts, to, a, b, order="<"):
        (kind,) = parts
        if kind in FLOATS:
            raise ValueError
        a, b = self.read(a, kind), self.read(b, kind)
        return self.write(to, kind, f"{a} {order} {b} ? {a} : {b}")

    def put_max(self, parts, to, a, b):
        return self.put_min(parts, to, a, b, ">")

    def put_shl(self, parts, to, a, by):
        kind = unsigned(parts[0])
        return self.write(to, kind, f"PTX_SHL({bits_of(kind)}, {self.read(a, kind)}, {self.read(by, 'u32')})")

    def put_shr(self, parts, to, a, by):
        kind = parts[0] if parts[0][0] == "s" else unsigned(parts[0])
        return self.write(to, kind, f"PTX_SHR({bits_of(kind)}, {self.read(a, kind)}, {self.read(by, 'u32')})")

    def put_bfi(self, parts, to, a, b, at, n):
        kind = unsigned(parts[0])
        a, b, at, n = self.read(a, kind), self.read(b, kind), self.read(at, "u32"), self.read(n, "u32")
        return self.write(to, kind, f"ptx_bfi({a}, {b}, {at}, {n})")

    def put_setp(self, parts, to, a, b):
        how, kind = parts
        kind = f"u{kind[1:]}" if kind[0] == "b" else kind
        a, b = self.read(a, kind), self.read(b, kind)
        if how == "nan":
            value = f"isunordered({a}, {b})"
        elif how == "neu":
            value = f"!({a} == {b})"
        elif how == "ne" and kind in FLOATS:
            value = f"!isunordered({a}, {b}) && {a} != {b}"
        else:
            value = f"{a} {COMPARED[how]} {b}"
        return f"{to[1:]} = {value};"

    def put_selp(self, parts, to, a, b, predicate):
        kind = unsigned(parts[0])
        return self.write(to, kind, f"{self.raw(predicate)} ? {self.read(a, kind)} : {self.read(b, kind)}")

    def put_cvt(self, parts, to, a):
        *rounding, kind, source = parts
        if (kind, source) == ("f32", "f16"):
            return self.write(to, kind, f"ptx_widen_f16({self.read(a, 'u16')})")
        if rounding == ["rn"] and source == "f32" and kind in ("f16", "bf16"):
            digits, least = {"f16": (10, -14), "bf16": (7, -126)}[kind]
            return self.write(to, "u16", f"ptx_narrow({self.read(a, source)}, {digits}, {least})")
        if (rounding, kind, source) not in ((["rn"], "f32", "f64"), ([], "f64", "f32")) and (
            rounding or kind in FLOATS or source in FLOATS
        ):
            raise ValueError
        value = self.read(a, source)
        return self.write(to, kind if kind in FLOATS or kind[0] == "u" else f"s{kind[1:]}", value)

    def put_cvta(self, parts, to, a):
        if parts != ["to", "global", "u64"]:
            raise ValueError
        return self.write(to, "u64", self.read(a, "u64"))

    def put_mov(self, parts, to, a):
        if parts == ["pred"]:
            return f"{to[1:]} = {self.raw(a)} != 0;"
        kind = unsigned(parts[0])
        if not (to + a).count("{"):
            return self.write(to, kind, self.read(a, kind))
        several = re.findall(r"%\w+|_", to if to[0] == "{" else a)
        width = bits_of(kind) // len(several)
        if to[0] == "{":
            whole = self.read(a, kind)
            return " ".join(
                self.write(part, f"u{width}", f"(uint{width}_t)({whole} >> {i * width})")
                for i, part in enumerate(several)
                if part != "_"
            )
        joined = " | ".join(
            f"(uint64_t){self.read(part, f'u{width}')} << {i * width}" for i, part in enumerate(several)
        )
        return self.write(to, kind, joined)

    def accesses(self, parts):
        """The space, the number of values, and the type of ``ld`` and ``st``."""
        parts = [part for part in parts if part != "volatile"]
        space, *vector, kind = parts
        if space not in ("param", "global", "shared") or vector not in ([], ["v2"], ["v4"]) or kind[0] == "s":
            raise ValueError
        return space, int(vector[0][1:]) if vector else 1, kind

    def put_ld(self, parts, to, address):
        space, n, kind = self.accesses(parts)
        size = bits_of(kind) // 8
        loads = [f"memcpy(&{part}, from + {i * size}, {size});" for i, part in enumerate(re.findall(r"%(\w+)", to))]
        clears = [f"{part} = 0;" for part in re.findall(r"%(\w+)", to)]
        if len(loads) != n:
            raise ValueError
        there = self.address(address, space, n * size)
        return f"{{ const unsigned char *from = {there}; {' '.join(clears + loads)} }}"

    def put_st(self, parts, address, values):
        space, n, kind = self.accesses(parts)
        size = bits_of(kind) // 8
        values = re.findall(r"[^\s,{}]+", values)
        if len(values) != n:
            raise ValueError
        stores = [
            f"value = {self.raw(value)}; memcpy(at + {i * size}, &value, {size});" for i, value in enumerate(values)
        ]
        there = self.address(address, space, n * size)
        return f"{{ unsigned char *at = {there}; uint64_t value; {' '.join(stores)} }}"

    def put_atom(self, parts, to, address, a):
        if parts != ["global", "add", "u32"]:
            raise ValueError
        there = self.address(address, "global", 4)
        return (
            f"{{ unsigned char *at = {there}; uint32_t before; memcpy(&before, at, 4); "
            f"const uint32_t after = before + {self.read(a, 'u32')}; memcpy(at, &after, 4); "
            f"{self.write(to, 'u32', 'before')} }}"
        )

    def put_bar(self, parts, barrier):
        if (parts, barrier) != (["sync"], "0"):
            raise ValueError
        return "self->barrier();"

    def put_membar(self, parts):
        return ";"  # threads take turns

    def put_bra(self, parts, label):
        return f"goto {label[1:]};"

    def put_ret(self, parts):
        return "return;"


def kernels_of(text):
    """All kernels of a module."""
    entries = re.findall(r"\.entry (\w+)\((.*?)\n\)[^{]*\{\n(.*?)\n\}", text, re.DOTALL)
    if len(entries) != len(re.findall(r"\.(?:entry|func)\b", text)):
        raise Unknown("a function that is no kernel")
    return [Kernel(*entry) for entry in entries]


def as_c(text):
    """The C of all kernels, and a table of them."""
    kernels = kernels_of(text)
    rows = [f'    {{"{k.name}", {k.name}, {k.argument_bytes}, {k.shared_bytes}}},' for k in kernels]
    table = ["const ptx_entry ptx_entries[] = {", *rows, "    {0},", "};", ""]
    return "\n".join(['#include "ptx.h"\n', *(kernel.c for kernel in kernels), *table])

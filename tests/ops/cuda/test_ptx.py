"""The inline PTX of cuda/ptx.cuh, which no emulator runs, against a table written from the PTX ISA."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.ops.cuda.toolchain import CUDA


@dataclass(frozen=True)
class Operand:
    """One operand of an instruction: a register, a vector {...} of them, an address [...], or a constant."""

    form: str
    """As it is written: "%" for a register, "{}" for a vector, "[]" for an address, else the constant itself."""
    constraint: str = ""
    """Of its registers: "r" 32 bits, "l" 64 bits, "f" float32, "n" a constant; "=" before what is written to."""
    values: tuple[str, ...] = ()
    """What C++ gives for each register."""


@dataclass(frozen=True)
class Asm:
    """An asm statement."""

    text: str
    outputs: tuple[tuple[str, str], ...]
    """(constraint, C++ expression) of each."""
    inputs: tuple[tuple[str, str], ...]
    is_volatile: bool
    clobbers: tuple[str, ...]


@dataclass(frozen=True)
class Instruction:
    """What the PTX ISA says of one: name with modifiers, then the operands in their order, those written to first."""

    name: str
    operands: tuple[Operand, ...] = ()
    touches_memory: bool = True
    """Memory that C++ knows of; the compiler must not move other accesses across it."""
    is_volatile: bool = True
    """It must run as often, and where, as the source says: all lanes together, or for what it does to memory."""

    @property
    def asm(self) -> Asm:
        written: list[str] = []
        number = 0
        for operand in self.operands:
            names = ", ".join(f"%{number + i}" for i in range(len(operand.values)))
            number += len(operand.values)
            written.append({"{}": f"{{{names}}}", "[]": f"[{names}]", "%": names}.get(operand.form, operand.form))
        registers = [(operand.constraint, value) for operand in self.operands for value in operand.values]
        return Asm(
            text=f"{self.name} {', '.join(written)}".strip() + ";",
            outputs=tuple(each for each in registers if each[0].startswith("=")),
            inputs=tuple(each for each in registers if not each[0].startswith("=")),
            is_volatile=self.is_volatile,
            clobbers=("memory",) if self.touches_memory else (),
        )


def elements(array: str, count: int) -> tuple[str, ...]:
    return tuple(f"{array}[{index}]" for index in range(count))


def ldmatrix(count: int, modifier: str = "") -> Instruction:
    """ldmatrix.sync.aligned.shape.num{.trans}{.ss}.type r, [p]: each lane gets 32 bits of each matrix."""
    name = f"ldmatrix.sync.aligned.m8n8.x{count}{modifier}.shared.b16"
    fragments = Operand("{}", "=r", elements("fragments", count))
    return Instruction(name, (fragments, Operand("[]", "r", ("shared_address(row)",))))


def mma(kind: str) -> Instruction:
    """mma.sync.aligned.m16n8k16.alayout.blayout.dtype.atype.btype.ctype d, a, b, c, in registers alone.

    Of 16-bit elements a lane has 4 pairs of A and 2 of B, of float32 4 of C and of D.
    """
    d, a = Operand("{}", "=f", elements("d", 4)), Operand("{}", "r", elements("a", 4))
    b, c = Operand("{}", "r", elements("b", 2)), Operand("{}", "f", elements("c", 4))
    return Instruction(f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32", (d, a, b, c), touches_memory=False)


TO_SHARED = Operand("[]", "r", ("shared_address(shared)",))
FROM_GLOBAL = Operand("[]", "l", ("global",))
SIXTEEN = Operand("16")
"""Bytes: .cg, past the L1 cache, takes no other size."""

INSTRUCTIONS = {
    "ldmatrix_x2": ldmatrix(2),
    "ldmatrix_x4": ldmatrix(4),
    "ldmatrix_x2_trans": ldmatrix(2, ".trans"),
    "ldmatrix_x4_trans": ldmatrix(4, ".trans"),
    "mma_m16n8k16_f16": mma("f16"),
    "mma_m16n8k16_bf16": mma("bf16"),
    # cp.async.cg.shared.global [dst], [src], cp-size{, src-size}: behind src-size bytes it writes zeros
    "cp_async_16": Instruction("cp.async.cg.shared.global", (TO_SHARED, FROM_GLOBAL, SIXTEEN)),
    "cp_async_16_zfill": Instruction(
        "cp.async.cg.shared.global", (TO_SHARED, FROM_GLOBAL, SIXTEEN, Operand("%", "r", ("valid ? 16 : 0",)))
    ),
    "cp_async_commit": Instruction("cp.async.commit_group"),
    "cp_async_wait": Instruction("cp.async.wait_group", (Operand("%", "n", ("groups_still_running",)),)),
    # A function of its operand, which the compiler may leave out or move.
    "exp2_approx": Instruction(
        "ex2.approx.ftz.f32", (Operand("%", "=f", ("y",)), Operand("%", "f", ("x",))), False, is_volatile=False
    ),
}
"""By the function of ptx.cuh."""

FUNCTION = re.compile(r"__device__ __forceinline__ \w+ (\w+)\(([^)]*)\) \{(.*?)\}\n", re.DOTALL)
ASM = re.compile(r"\basm\s*(volatile)?\s*\((.*)\);", re.DOTALL)
STRING = re.compile(r'"([^"]*)"')


def statements(source: str) -> dict[str, Asm]:
    """The asm statement of each function that has one."""
    device_code = re.sub(r"//.*", "", source.partition("#else")[2])
    found = {}
    for name, _, body in FUNCTION.findall(device_code):
        assert body.count("asm") <= 1, f"{name} has several instructions"
        match = ASM.search(body)
        if match is not None:
            found[name] = _parsed(bool(match[1]), match[2])
    assert len(found) == len(re.findall(r"\basm\b", device_code)), "an asm statement was overlooked"
    return found


def _parsed(is_volatile: bool, content: str) -> Asm:
    """`"text" : outputs : inputs : clobbers`; the colons of expressions stand within parentheses."""
    sections, depth, in_string = [""], 0, False
    for character in content:
        in_string ^= character == '"'
        depth += 0 if in_string else (character == "(") - (character == ")")
        if character == ":" and depth == 0 and not in_string:
            sections.append("")
        else:
            sections[-1] += character
    text, outputs, inputs, clobbers = [*sections, "", "", ""][:4]
    return Asm(
        text="".join(STRING.findall(text)),
        outputs=_operands(outputs),
        inputs=_operands(inputs),
        is_volatile=is_volatile,
        clobbers=tuple(STRING.findall(clobbers)),
    )


def _operands(section: str) -> tuple[tuple[str, str], ...]:
    """Each "constraint"(expression)."""
    pieces = re.split(r',(?=\s*")', section.strip()) if section.strip() else []
    matches = [re.fullmatch(r'\s*"([^"]*)"\((.*)\)\s*', piece, re.DOTALL) for piece in pieces]
    assert all(matches), f"not understood: {section}"
    return tuple((match[1], match[2]) for match in matches if match is not None)


SOURCE = (CUDA / "ptx.cuh").read_text(encoding="utf-8")


def test_every_instruction_is_in_the_table() -> None:
    assert statements(SOURCE).keys() == INSTRUCTIONS.keys()
    assert not [
        path.name for path in CUDA.glob("*.cu*") if path.name != "ptx.cuh" and re.search(r"\basm\b", _code(path))
    ]


def _code(path: Path) -> str:
    return re.sub(r"//.*", "", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("function", INSTRUCTIONS)
def test_instruction(function: str) -> None:
    assert statements(SOURCE)[function] == INSTRUCTIONS[function].asm


def test_addresses_of_shared_memory_are_those_of_its_own_space() -> None:
    """ldmatrix and cp.async take 32 bits that count from the beginning of shared memory, not generic pointers."""
    assert "unsigned shared_address(const void* pointer) {" in SOURCE
    assert "return static_cast<unsigned>(__cvta_generic_to_shared(pointer));" in SOURCE


@pytest.mark.parametrize(
    ("function", "old", "new"),
    [
        ("ldmatrix_x4_trans", ".x4.trans", ".x4"),
        ("ldmatrix_x2", ".x2", ".x4"),
        ("ldmatrix_x4", "{%0, %1, %2, %3}", "{%0, %2, %1, %3}"),
        ("ldmatrix_x4", '"=r"(fragments[1])', '"=r"(fragments[2])'),
        ("ldmatrix_x2_trans", '"=r"(fragments[0])', '"=f"(fragments[0])'),
        ("ldmatrix_x4", "asm volatile", "asm"),
        ("ldmatrix_x4", '\n                 : "memory"', ""),
        ("mma_m16n8k16_bf16", "bf16.bf16", "f16.f16"),
        ("mma_m16n8k16_f16", "row.col", "row.row"),
        ("mma_m16n8k16_f16", '"r"(a[1]), "r"(a[2])', '"r"(a[2]), "r"(a[1])'),
        ("mma_m16n8k16_f16", '"f"(c[0])', '"r"(c[0])'),
        ("cp_async_16", "16;", "8;"),
        ("cp_async_16", "[%0], [%1]", "[%1], [%0]"),
        ("cp_async_16", ".cg.", ".ca."),
        ("cp_async_16", '"l"(global)', '"r"(global)'),
        ("cp_async_16_zfill", "valid ? 16 : 0", "valid ? 0 : 16"),
        ("cp_async_16_zfill", "16, %2", "16"),
        ("cp_async_commit", "commit_group", "wait_all"),
        ("cp_async_wait", '"n"(groups_still_running)', '"n"(0)'),
        ("cp_async_wait", '::"n"(groups_still_running) : "memory"', '::"n"(groups_still_running)'),
        ("exp2_approx", "ex2.approx.ftz", "ex2.approx"),
    ],
)
def test_an_edit_is_seen(function: str, old: str, new: str) -> None:
    begin = SOURCE.index(f" {function}(")
    edited = SOURCE[:begin] + SOURCE[begin:].replace(old, new, 1)
    assert edited != SOURCE
    found = statements(edited)
    assert [name for name, instruction in INSTRUCTIONS.items() if found[name] != instruction.asm] == [function]

"""Plants small faults into a copy of the code, one at a time, and says which of them no test catches.

    python -m tests.mutation_run minipaged/kv cpu/rows.h --count 40 --seed 1

A mutant is one edit: a comparison or an operator exchanged, a constant one off, a call left out. Those to plant are
drawn at random; each runs the tests that concern its file, and a hang counts as caught. What survives is printed as
`file:line: before → after`: either it changes nothing that anybody could see, or a test is missing.
"""

from __future__ import annotations

import argparse
import ast
import copy
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from minipaged.ops.cpu import _kernels
from tests.ops.cuda.compiler import cache

ROOT = Path(__file__).parent.parent
ENGINE = ("tests/engine/test_engine_random.py", "tests/engine/test_engine.py")
ALONE = "tests/engine/test_equals_alone.py"
CUDA = tuple(
    f"tests/ops/cuda/test_{name}.py"
    for name in ("batch", "graphs", "staging", "workspace", "launches", "modules", "device_choice", "ops", "engine")
)
KERNELS = ("tests/ops/cuda/test_kernels.py", "tests/ops/cuda/test_ops.py")
CPU = ("tests/ops/cpu", "tests/ops/test_sample.py", "tests/ops/test_attention.py", "tests/engine/test_cpu_engine.py")
TESTS = {
    "minipaged/kv": ("tests/kv", "tests/scheduling", *ENGINE),
    "minipaged/scheduling": ("tests/scheduling", *ENGINE, ALONE),
    "minipaged/execution": ("tests/execution", *ENGINE, ALONE),
    "minipaged/ops/cuda": CUDA,
    "minipaged/ops/cpu": CPU,
    "minipaged/ops/workspace.py": ("tests/ops/cuda/test_workspace.py", *CPU),
    "minipaged/ops": ("tests/ops/test_philox.py", "tests/ops/reference", *CPU[1:]),
    "cpu": CPU,
    "cuda/attention.cu": ("tests/ops/cuda/test_attention.py", *KERNELS),
    "cuda/linear.cu": ("tests/ops/cuda/test_linear.py", *KERNELS),
    "cuda/sampling.cu": ("tests/ops/cuda/test_sampling.py", *KERNELS),
    "cuda": KERNELS,
}
"""What to run for a file: the entry of the longest beginning of its path."""

OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.Mod: ast.Add,
}  # fmt: skip
FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any", "reversed": "list"}
C_TOKENS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "&&": "||", "||": "&&", "+": "-", "-": "+",
    "*": "+", "/": "*", "%": "+", "+=": "-=", "<<": ">>", ">>": "<<", "&": "|", "min": "max", "max": "min",
    "fmaxf": "fminf", "continue;": ";", "__syncthreads();": ";", "__syncwarp();": ";",
}  # fmt: skip
C_TOKEN = re.compile(
    r"(?<= )[-<>=!&|+*/%]{1,2}(?= )|(?<![\w.])\d+(?![\w.])|\b(?:min|max|fmaxf)(?=\()|\bcontinue;|__sync\w+\(\);"
)
C_SKIPPED = re.compile(
    r'/\*.*?\*/|//[^\n]*|"[^"\n]*"|^\s*(?:#|static_assert|_Static_assert)[^\n]*', re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """Bytes `start` to `end` of a file become `after`."""

    path: str
    line: int
    start: int
    end: int
    before: str
    after: str


def mutants_of(path: str) -> Iterator[Mutant]:
    source = (ROOT / path).read_bytes()
    return python_mutants(path, source) if path.endswith(".py") else c_mutants(path, source.decode("latin-1"))


def python_mutants(path: str, source: bytes) -> Iterator[Mutant]:
    starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
    for old, new in (edit for node in acting(ast.parse(source)) for edit in edits(node)):
        start = starts[old.lineno - 1] + old.col_offset
        end = starts[(old.end_lineno or 0) - 1] + (old.end_col_offset or 0)
        after = ast.unparse(new)
        yield Mutant(
            path,
            old.lineno,
            start,
            end,
            ast.unparse(old),
            after if isinstance(new, ast.stmt | ast.Slice) else f"({after})",
        )


def acting(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that do something: no types, no decorators, no checks of debug mode, no texts of errors."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr):
        return
    if isinstance(node, ast.FunctionDef) and node.name.lstrip("_").startswith("check"):
        return
    yield node
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in ("annotation", "returns", "decorator_list"):
                yield from acting(child)


def edits(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, ast.expr | ast.stmt]]:
    """A node, or a part of it, and what may stand in its place."""
    match node:
        case ast.Compare():
            for index, operator in enumerate(node.ops):
                edited = copy.deepcopy(node)
                edited.ops[index] = OPERATORS[type(operator)]()  # type: ignore[call-overload]
                yield node, edited
        case ast.BinOp() | ast.AugAssign() | ast.BoolOp() if type(node.op) in OPERATORS:
            changed = copy.copy(node)
            changed.op = OPERATORS[type(node.op)]()  # type: ignore[assignment]
            yield node, changed
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield node, node.operand
        case ast.Constant(value=bool()):
            yield node, ast.Constant(not node.value)
        case ast.Constant(value=int(number)):
            yield from ((node, ast.Constant(number + step)) for step in (-1, 1))
        case ast.Call(func=ast.Name(id=name)) if name in FUNCTIONS:
            yield node.func, ast.Name(FUNCTIONS[name])
        case ast.Call(func=ast.Name(id="range")):
            yield node.args[-1], ast.BinOp(node.args[-1], ast.Sub(), ast.Constant(1))
        case ast.Slice():
            yield from ((node, ast.Slice(None, node.upper, node.step)) for _ in [0] if node.lower)
            yield from ((node, ast.Slice(node.lower, None, node.step)) for _ in [0] if node.upper)
        case ast.IfExp() | ast.If() | ast.While() if isinstance(node.test, ast.Name | ast.Attribute | ast.Call):
            yield node.test, ast.UnaryOp(ast.Not(), node.test)
        case ast.Expr(value=ast.Call()) | ast.Break() | ast.Continue() | ast.Delete():
            yield node, ast.Pass()
        case ast.Assign(targets=[ast.Subscript() | ast.Attribute()]):
            yield node, ast.Pass()


def c_mutants(path: str, source: str) -> Iterator[Mutant]:
    text, lines = C_SKIPPED.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), source), source.splitlines()
    for match in C_TOKEN.finditer(text):
        token, line = match[0], text.count("\n", 0, match.start()) + 1
        number = [str(int(token) - 1), str(int(token) + 1)] if token.isdecimal() else []
        for after in [C_TOKENS[token]] if token in C_TOKENS else number:
            yield Mutant(path, line, *match.span(), f"{lines[line - 1].strip()}: {token}", after)


class Tree:
    """A copy of the checkout, in which one mutant at a time is planted.

    Raises `RuntimeError` if the tests of any of `files` fail without one.
    """

    def __init__(self, folder: Path, files: Sequence[str]) -> None:
        self._folder = folder / "tree"
        shutil.copytree(ROOT, self._folder, ignore=shutil.ignore_patterns(".git", ".venv", "build", "__pycache__"))
        shutil.copytree(cache(), folder / "cache" / cache().name)  # what is compiled already
        settings = {"PYTHONPATH": str(self._folder), "PYTHONHASHSEED": "0", "MINIPAGED_CACHE": str(folder / "cache")}
        self._environment = {**os.environ, **settings}
        with (self._folder / "tests" / "conftest.py").open("a") as conftest:  # the same examples each time, none shrunk
            conftest.write(
                "\nPHASES = (hypothesis.Phase.explicit, hypothesis.Phase.generate)\n"
                "hypothesis.settings.register_profile('mutants', deadline=None, derandomize=True, phases=PHASES)\n"
                "hypothesis.settings.load_profile('mutants')\n"
            )
        self._library = self._folder / "minipaged" / "ops" / "cpu" / "_kernels.abi3.so"
        self._kernels, self._flags = self._keep_one_instruction_set()
        self._sound = self._compile()
        self._seconds: dict[tuple[str, ...], float] = {}
        for tests in {tests_of(file): file for file in files}:
            if self._run(tests) != "survived":
                raise RuntimeError(f"These tests fail without any mutant: {' '.join(tests)}")

    def judge(self, mutant: Mutant) -> str:
        """Whether tests have "caught" a mutant, or it "survived"; "void" if it is no code, or compiles to the same."""
        path = self._folder / mutant.path
        source = path.read_bytes()
        path.write_bytes(source[: mutant.start] + mutant.after.encode() + source[mutant.end :])
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*"):
            compiled.unlink()  # its time stamp may be the same
        try:
            if mutant.path.startswith("cpu/") and self._compile() in (b"", self._sound):
                return "void"
            return self._run(tests_of(mutant.path))
        finally:
            path.write_bytes(source)
            self._library.write_bytes(self._sound)

    def _run(self, tests: tuple[str, ...]) -> str:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=short", *tests]
        began = time.monotonic()
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                command, cwd=self._folder, env=self._environment, stdout=output, stderr=output, start_new_session=True
            )
            try:
                status = process.wait(60 + 4 * self._seconds.get(tests, 200))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                status = process.wait()
            if status == 0:
                self._seconds[tests] = time.monotonic() - began
                return "survived"
            output.seek(0)
            return "void" if b"CompilationError" in output.read() else "caught"

    def _keep_one_instruction_set(self) -> tuple[str, list[str]]:
        """Let cpu/module.c offer this machine's best one alone, thrice, as the tests vary threads with its place.

        Returns what its kernels are called, and the compiler's flags for them.
        """
        module = self._folder / "cpu" / "module.c"
        text = module.read_text()
        entry = re.search(rf'\n *sets\[count\+\+\] = [^\n]*"{re.escape(_kernels.supported()[-1])}", (\w+)[^\n]*', text)
        assert entry is not None
        text = re.sub(r"\n *sets\[count\+\+\] =[^\n]*", "", text)
        module.write_text(text.replace("\n    return count;", entry[0] * 3 + "\n    return count;", 1))
        flags = re.search(rf'"{entry[1]}": (\[.*\])', (ROOT / "setup.py").read_text())
        assert flags is not None
        return entry[1], ast.literal_eval(flags[1])

    def _compile(self) -> bytes:
        """Make the CPU kernels; returns the library, empty if the source is no code."""
        options = ["-O1", "-std=gnu11", "-ffp-contract=off", "-pthread", "-fPIC", "-shared", "-w", *self._flags]
        sources = ["cpu/kernels.c", "cpu/module.c", "cpu/team.c", f"-DKERNELS={self._kernels}"]
        command = ["cc", *options, *sources, f"-I{sysconfig.get_paths()['include']}", "-o", str(self._library)]
        done = subprocess.run(command, cwd=self._folder, capture_output=True, check=False)
        return b"" if done.returncode else self._library.read_bytes()


def tests_of(path: str) -> tuple[str, ...]:
    return TESTS[max((place for place in TESTS if path.startswith(place)), key=len)]


def files_of(paths: Sequence[str]) -> list[str]:
    """The source files among paths and in folders, relative to the checkout."""
    places = [ROOT / path for path in paths]
    files = {file for place in places for file in ([place] if place.is_file() else place.rglob("*.*"))}
    return sorted(str(file.relative_to(ROOT)) for file in files if file.suffix in (".py", ".c", ".h", ".cu"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", help="files and folders, relative to the checkout")
    parser.add_argument("--count", type=int, default=50, help="mutants to plant")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="copies of the checkout that work at once")
    arguments = parser.parse_args()
    files = files_of(arguments.paths)
    mutants = [mutant for file in files for mutant in mutants_of(file)]
    random.Random(arguments.seed).shuffle(mutants)
    verdicts: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def planted() -> int:
        return sum(counts["caught"] + counts["survived"] for counts in verdicts.values())

    def work(folder: Path) -> None:
        tree = Tree(folder, files)
        while mutants and planted() < arguments.count:
            mutant = mutants.pop()
            verdict = tree.judge(mutant)
            verdicts[mutant.path][verdict] += 1
            if verdict == "survived":
                print(f"{mutant.path}:{mutant.line}: {mutant.before} → {mutant.after}", flush=True)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as executor:
        for _ in executor.map(work, [Path(folder) / str(job) for job in range(arguments.jobs)]):
            pass
    print(json.dumps({"planted": planted(), **sum(verdicts.values(), Counter[str]()), "files": verdicts}))


if __name__ == "__main__":
    main()

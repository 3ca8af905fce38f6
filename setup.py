"""Builds the CPU kernels and ships the folder cuda/ in the package; all else about packaging is in pyproject.toml."""

import os
import platform
from glob import glob

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

COMMON = ["-std=gnu11", "-O3", "-ffp-contract=off", "-pthread"]
"""No contraction: which products and sums are fused is written in the kernels, so that no compiler decides it anew."""

X86_VARIANTS = {
    "kernels_v2": ["-march=x86-64-v2"],
    "kernels_v3": ["-march=x86-64-v3"],
    "kernels_v4": ["-march=x86-64-v4"],
    "kernels_v4_vnni": ["-march=x86-64-v4", "-mavx512vnni"],
    "kernels_v4_bf16": ["-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"],
}

ARM_VARIANTS = {
    "kernels_v8": [],
    "kernels_v8_dotprod": ["-march=armv8.2-a+dotprod"],
}

OTHER_VARIANTS: dict[str, list[str]] = {"kernels_base": []}


def variants() -> dict[str, list[str]]:
    """Flags of each variant of the kernels for the machine that is built for; cpu/module.c names the same ones."""
    machine = platform.machine().lower()
    if machine in ("arm64", "aarch64") or "arm64" in os.environ.get("ARCHFLAGS", ""):
        return ARM_VARIANTS
    return X86_VARIANTS if machine in ("x86_64", "amd64") else OTHER_VARIANTS


class BuildKernels(build_ext):
    """Compiles cpu/kernels.c once per instruction set; the module chooses among them when it runs."""

    def build_extension(self, ext: Extension) -> None:
        """Compile every variant, and link them into one module."""
        ext.extra_objects = []
        for name, flags in variants().items():
            # One folder each: the object files would have the same name.
            ext.extra_objects += self.compiler.compile(
                ["cpu/kernels.c"],
                output_dir=os.path.join(self.build_temp, name),
                macros=[("KERNELS", name)],
                extra_postargs=[*COMMON, *flags],
                depends=ext.depends,
            )
        super().build_extension(ext)


setup(
    packages=[*find_packages(include=["minipaged", "minipaged.*"]), "minipaged.cuda"],
    package_dir={"minipaged.cuda": "cuda"},
    ext_modules=[
        Extension(
            "minipaged.ops.cpu._kernels",
            sources=["cpu/module.c", "cpu/team.c"],
            depends=sorted(glob("cpu/*.h")),
            extra_compile_args=COMMON,
            extra_link_args=["-pthread"],
            py_limited_api=True,
            optional=True,  # without a compiler the engine runs on the reference operations
        )
    ],
    cmdclass={"build_ext": BuildKernels},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)

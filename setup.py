"""Ships the folder cuda/ inside the package; everything else about packaging stands in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["minipaged", "minipaged.*"]), "minipaged.cuda"],
    package_dir={"minipaged.cuda": "cuda"},
)

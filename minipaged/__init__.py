"""minipaged: the language-model inference engine that a Python program imports."""

__version__ = "0.1.0"

"""minipaged: the language-model inference engine that a Python program imports."""

"""The prompts of smollm2.json."""

RAW = {
    "english": "The capital of France is",
    "story": "Once upon a time, in a small village by the sea, there lived",
    "chinese": "人工智能是计算机科学的一个分支，它",
    "arabic": "اللغة العربية هي",
    "cyrillic": "Москва является столицей",
    "greek": "Η Αθήνα είναι",
    "devanagari": "नमस्ते, मेरा नाम",
    "code": "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return",
    "emoji": "Happy birthday! 🎉🎂 Let's celebrate 👩‍👩‍👧",
    "digits": "1, 1, 2, 3, 5, 8, 13, 21, 34,",
}

CHAT = {
    "chat": [{"role": "user", "content": "Why is the sky blue?"}],
    "chat_system": [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "What is 7 times 6?"},
    ],
    "chat_turns": [
        {"role": "user", "content": "My name is Zoë. Say hello in French."},
        {"role": "assistant", "content": "Bonjour, Zoë!"},
        {"role": "user", "content": "Et en allemand?"},
    ],
    "chat_code": [{"role": "user", "content": "Write a Python function that reverses a string."}],
}

"""Text in many scripts, and the kinds of text that tokenizers get wrong."""

SAMPLES = {
    "latin": "Why is the sky blue? The light of the sun is scattered by the air, and blue light is scattered most.",
    "latin_accents": "Où êtes-vous né ? Größere Äpfel über fünf Öfen. Señor Núñez comió piñón. Žluťoučký kůň.",
    "contractions": "I'm sure they've said it's his, we'll see; YOU'RE RIGHT, DON'T THEY'LL I'D. ’tis rock 'n' roll",
    "cyrillic": "Почему небо голубое? Свет солнца рассеивается воздухом, и голубой свет рассеивается сильнее.",
    "greek": "Γιατί ο ουρανός είναι γαλάζιος; Το φως του ήλιου σκεδάζεται από τον αέρα.",
    "arabic": "لماذا السماء زرقاء؟ ضوء الشمس يتشتت في الهواء، والضوء الأزرق يتشتت أكثر. مُحَمَّد ١٢٣",
    "hebrew": "מדוע השמיים כחולים? אור השמש מתפזר באוויר. שָׁלוֹם",
    "devanagari": "आसमान नीला क्यों है? सूरज की रोशनी हवा में बिखरती है। १२३४",
    "thai": "ทำไมท้องฟ้าจึงเป็นสีฟ้า แสงแดดกระจายในอากาศ ๑๒๓",
    "chinese": "天空为什么是蓝色的？阳光被空气散射，蓝光散射得最多。2024年5月",
    "japanese": "空はなぜ青いのですか？ 太陽の光は空気で散乱します。カタカナとひらがな。",
    "korean": "하늘은 왜 파란가요? 햇빛은 공기에 의해 산란됩니다.",
    "emoji": "👩‍👩‍👧 family 🇫🇷🇯🇵 flags 👍🏽 thumbs ❤️ heart 🧑🏿‍🚀🚀!!",
    "code": "def f(x: int) -> str:\n    if x != 0:\n\t\treturn f'{x:>10}\\n'\n    # nothing\n\n\n    return \"\"\r\n",
    "digits": "1 12 123 1234 12345 1234567890 3.14159 1,000,000 0xFF 2nd ½ ² Ⅷ ١٢٣",
    "whitespace": "  two   three    four\t\ttabs \n\n new \n \n lines\r\n\r\n  end   ",
    "only_spaces": "        ",
    "odd_spaces": "no\u00a0break\u3000wide\u2003em\u200bzero\u2028line\u0085next\ufeffmark",
    "punctuation": "...!!??—“quoted” «text» (a) [b] {c} <d> a/b\\c @user #tag $5.00 50% x_y ~ ^ | `tick`\n\n...\n",
    "one": "a",
    "empty": "",
    "mixed": "Hello мир こんにちは 世界! naïve café 東京2020 x² + y² = z²; ∀ε>0 ∃δ",
    "repeats": "aaaaaaaaaaaaaaa bbbbbbb !!!!!!!!!! ..... hahahahahaha ======",
}

# Not in Unicode's composed form NFC: Qwen2's tokenizer composes it, others keep it.
DECOMPOSED = "e\u0301te\u0301 A\u030angstro\u0308m \u1112\u1161\u11ab\u1100\u116e\u11a8"

# Spells out special tokens of the vocabularies in golden.json and of SmolLM2.
SPECIAL = "<|im_start|>user\nHi<|im_end|>\n<s>Why</s> is <|begin|>the<|end|> <s> sky <unk>blue<s><s>?</s>"

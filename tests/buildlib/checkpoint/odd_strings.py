"""Two hundred strings on which tokenizers differ, if they do."""

# ruff: noqa: E501, RUF001

_ACCENTED = "e\N{COMBINING ACUTE ACCENT}"
_WORDS = (
    "", "a", "Hello world", " leading", "trailing ", "  two  spaces  ", "CamelCaseIdentifier",
    "snake_case_name", "it's I'LL we'Ve they'd 'tis rock'n'roll", "don’t “quote” — dash…",
    "MiXeD CaSe HTTPServer iPhone", "ALLCAPS lower UPPER", "naïve café façade", _ACCENTED * 3,
    f"caf{_ACCENTED}", "Å Å Å", "ﬁ ligature ﬀ", "ß ẞ ǆ ǅ", "İstanbul ıi", "Ω Ω", "½ ² ③ Ⅷ ٣ ४",
    "user@example.org", "https://example.org/a?b=c&d=%20#e", "C:\\Users\\x\\n", "../../etc/passwd",
)  # fmt: skip
_WHITESPACE = tuple(
    text
    for run in (" ", "\n", "\t", "\r\n", "\r", "\v", "\f", "\N{NO-BREAK SPACE}", "\u2003", "\u3000")
    for text in (run, run * 2, run * 5, f"a{run}b", f"{run}a", f"a{run}", f"a {run} b")
)
_BREAKS = (
    "\n \n  \n", " \n", "\n ", "a  \n  b", "\u200b", "a\u200bb", "\u200d", "\ufeffbom", "\u2028x",
)  # fmt: skip
_DIGITS = (
    "0", "12", "123", "1234", "12345", "123456789012345678901", "1,234,567.89", "3.14159e-10",
    "-0", "1/2", "0x1F", "2026-11-29T02:43:00Z", "192.168.0.1", "1st 2nd 3rd", "٠١٢٣٤٥", "１２３",
    "a1b2c3", "1a2b", "1 2 3 4 5", "100%", "$9.99", "№5",
)  # fmt: skip
_SCRIPTS = (
    "你好，世界！", "日本語のテキスト。カタカナ", "한국어 문장입니다", "汉字kanji漢字123", "𠮷野家",
    "Привет, мир", "Γειά σου Κόσμε", "שלום עולם", "مرحبا بالعالم", "नमस्ते दुनिया", "ไทยภาษา",
    "தமிழ்", "ქართული", "Հայերեն", "አማርኛ", "မြန်မာ", "Tiếng Việt", "a\u202eb\u202cc", "ᚠᚢᚦ", "𝔘𝔫𝔦",
    "\u0915\u094d\u0937", "\u1100\u1161\u11a8", "각", "が", "\N{HIRAGANA LETTER KA}\u3099",
)  # fmt: skip
_EMOJI = (
    "😀", "😀😃😄", "👍🏽", "👨‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪🇫🇷", "❤️", "❤", "a😀b", "1️⃣", "☃︎", "😀 😀\n😀", "🫠🪿",
    "\U0001f9d1\u200d\U0001f680",
)  # fmt: skip
_CODE = (
    "def f(x):\n    return x + 1\n", "if (a && b || !c) { x += 1; }", "for(int i=0;i<n;++i){}",
    "<div class=\"a\">&amp;</div>", "SELECT * FROM t WHERE a <> 'b';", "#include <stdio.h>\n",
    "\tindented\n\t\tmore", "x = {'a': [1, 2, {}]}", "// comment\n/* block */", "a->b::c()",
    "```python\nprint('x')\n```", "$\\frac{a}{b}$", "== != === <= >= => ->", "----------", "======",
    "...", "!!!???", "((((()))))", "_____", "{{ jinja }} {% if %}", "\\n\\t\\x00", "~`@#$%^&*",
    "            deep", "a.b.c.d", "x" * 100, "ab" * 40, "=" * 80, " " * 80,
)  # fmt: skip
_SPECIAL = (
    "<s>", "</s>", "<unk>", "<|im_start|>user\nhi<|im_end|>\n", "<|endoftext|>", "<bos><eos>",
    "a<s>b", "<s> a </s> b", " <s> ", "<|im_start|>  x  <|im_end|>  y", "<|im_start", "<|x|>",
    "<start_of_turn>user\nhi<end_of_turn>\n", "[INST] hi [/INST]", "<|begin_of_text|>a", "<0x0A>",
    "<think>\nx\n</think>", "\N{LOWER ONE EIGHTH BLOCK}", "a\N{LOWER ONE EIGHTH BLOCK}b", "Ġa Ċ",
    "\x00", "a\x00b", "\x01\x02\x7f", "\x85", "\ufffd", "\U0010ffff",
)  # fmt: skip

ODD_STRINGS = tuple(
    dict.fromkeys(
        (*_WORDS, *_WHITESPACE, *_BREAKS, *_DIGITS, *_SCRIPTS, *_EMOJI, *_CODE, *_SPECIAL)
    )
)

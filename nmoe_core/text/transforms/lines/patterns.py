"""What the rules for lines and sentences of C4, FineWeb and RefinedWeb look for.

Patterns are in the syntax of RE2, and are matched without regard to case, except `CITATION`.
"""

SENTENCE_ENDS = (  # sentence terminals of Unicode 15.1 in the basic plane, and Tibetan ones
    ".?!\u0589\u061d\u061e\u061f\u06d4\u0700\u0701\u0702\u07f9\u0837\u0839\u083d\u083e\u0964\u0965"
    "\u0f0d\u0f0e\u0f0f\u0f10\u0f11\u1362\u1367\u1368\u166e\u1735\u1736\u1803\u1809\u1944\u1945"
    "\u1c3b\u1c3c\u1c7e\u1c7f\u203c\u203d\u2047\u2048\u2049\u2e2e\u2e3c\u2e53\u2e54\ua4ff\ua60e"
    "\ua60f\ua6f3\ua6f7\ua876\ua877\ua8ce\ua8cf\ua92f\u2cf9\u2cfa\u2cfb\uaaf0\uaaf1\uabeb"
)
WIDE_SENTENCE_ENDS = (  # sentence terminals of scripts without spaces
    "。！？．｡﹒﹖﹗︒︕︖\u104a\u104b\u17d4\u17d5\u1aa8\u1aa9\u1aaa\u1aab\u1b5a\u1b5b\u1b5e\u1b5f"
    "\u1b7d\u1b7e\ua9c8\ua9c9\uaa5d\uaa5e\uaa5f"
)
CLOSERS = "\"'”’»」』)"
LINE_ENDS = SENTENCE_ENDS + WIDE_SENTENCE_ENDS + "\"'”’»」』"
LONG_WORD_CHARS = 1000
LEAST_C4_WORDS = 5
LEAST_REFINEDWEB_WORDS = 2
CITATION = r"\[\p{Nd}*\]|\[edit\]|\[citation needed\]"
JAVASCRIPT = "javascript"
POLICY = "terms of use|privacy policy|cookie policy|uses cookies|use of cookies|use cookies"
_COUNTED = (
    "(?:likes|shares|comments|retweets|reposts|quotes|bookmarks|upvotes|downvotes|downloads|views|"
    "followers)"
)
COUNT = rf"\d[kmb]?\s+{_COUNTED}"
"""A part of each counter, which other text seldom has."""
COUNTER = rf"^[^\pL\pN_]*\d(?:,|\.|\d)*(?:K|k|M|m|B|b)?\s+{_COUNTED}[^\pL\pN_]*$"

"""Words of the texts that small decoders learn from."""

NATURE = (
    *("the", "river", "runs", "past", "old", "stone", "houses"),
    *("while", "people", "walk", "home", "under", "quiet", "trees"),
)
KITCHEN = (
    *("warm", "bread", "butter", "salt", "knife", "table", "oven"),
    *("flour", "dough", "mix", "bake", "slowly", "until", "golden"),
)
TRADE = (
    *("price", "share", "market", "bank", "loan", "profit", "seller"),
    *("buyer", "trade", "paper", "gold", "stock", "fund", "tax"),
)

torches: dict[str, str]

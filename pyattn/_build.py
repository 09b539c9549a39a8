torches = {  # the versions that this build has a border for, by minor version
    "2.13": "2.13.0+cpu",
}

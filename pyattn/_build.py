torch_version = "2.13.0+cpu"

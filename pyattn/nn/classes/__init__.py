"""The modules, a file for each class or family of a book or a paper."""

"""Gets an editable install out of the way, whose finder precedes the folders of PYTHONPATH in every new process."""

WITHOUT_EDITABLE = "import sys\nsys.meta_path = [f for f in sys.meta_path if 'editable' not in type(f).__module__]\n"
"""The text of a ``sitecustomize.py``, or the first lines of a script, that imports pyattn from another folder."""

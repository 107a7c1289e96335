"""The examples of the README, run."""

import contextlib
import io
import pathlib
import re
import unittest

README = pathlib.Path(__file__).resolve().parent.parent / "README.md"


class Readme(unittest.TestCase):
    def test_examples(self):
        examples = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        self.assertGreater(len(examples), 0)
        printed = io.StringIO()
        for example in examples:
            with contextlib.redirect_stdout(printed):
                exec(compile(example, str(README), "exec"), {})
        self.assertIn("rows × 10 keys", printed.getvalue())


if __name__ == "__main__":
    unittest.main()

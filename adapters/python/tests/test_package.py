"""What the wheel contains."""

import ast
import importlib.metadata
import inspect
import pathlib
import unittest

import sdpa


def parameters(function, options):
    """Names of a function of the stub, with the texts of defaults, those that `options` stands for last and without."""
    given = function.args
    plain = [argument.arg for argument in given.args]
    defaults = [""] * (len(plain) - len(given.defaults)) + [ast.unparse(default) for default in given.defaults]
    return dict(zip(plain, defaults)), {argument.arg for argument in given.kwonlyargs} | options


class Package(unittest.TestCase):
    def test_version_and_dependencies(self):
        self.assertEqual(sdpa.__version__, importlib.metadata.version("sdpa"))
        self.assertEqual([name.split(">")[0] for name in importlib.metadata.requires("sdpa")], ["numpy"])

    def test_types_are_those_of_the_functions(self):
        folder = pathlib.Path(sdpa.__file__).parent
        self.assertTrue((folder / "py.typed").exists())
        stub = ast.parse((folder / "__init__.pyi").read_text(encoding="utf-8")).body
        [typed] = (item for item in stub if isinstance(item, ast.ClassDef) and item.name == "_Options")
        options = {line.target.id for line in typed.body}
        functions = [item for item in stub if isinstance(item, ast.FunctionDef) and item.args.kwarg]
        names = ["scaled_dot_product_attention", "scaled_dot_product_attention", "explain"]
        self.assertEqual([function.name for function in functions], names)
        for function in functions:
            real = inspect.signature(getattr(sdpa, function.name)).parameters.values()
            plain = [parameter for parameter in real if parameter.kind == parameter.POSITIONAL_OR_KEYWORD]
            defaults = ["" if parameter.default is parameter.empty else repr(parameter.default) for parameter in plain]
            by_name = {parameter.name for parameter in real if parameter.kind == parameter.KEYWORD_ONLY}
            self.assertEqual(parameters(function, options), (dict(zip((p.name for p in plain), defaults)), by_name))

    def test_every_argument_is_explained(self):
        readme = (pathlib.Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")
        for n, name in enumerate(inspect.signature(sdpa.scaled_dot_product_attention).parameters):
            self.assertIn(f"`{name}`", readme)
            self.assertIn(f"``{name}``" if n < 3 else f"\n{name}: ", inspect.getdoc(sdpa.scaled_dot_product_attention))

    def test_instruction_sets(self):
        self.assertEqual(sdpa.instruction_sets()[0], "portable")


if __name__ == "__main__":
    unittest.main()

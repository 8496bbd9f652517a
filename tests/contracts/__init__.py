"""What every entry of a registry does, one module for each contract: read these first.

A contract test runs over all entries, so a new entry passes it unchanged or has a bug. Most entries need options that
fit the small models of the tests: they are in a table at the top of the module, and a test fails if one is missing.

What is checked: a row does not depend on batch mates, order, padding, chunks or streaming; speculation changes no
token; a second call traces nothing; guarantees are those that the registry states; values outside of what options
declare are refused by name. Models have no registry: `test_model.py` lists the architectures. Single methods are
compared with their authors' numbers in `tests/conformance` and in the module of the method; laws of the round are in
`tests/laws`.
"""

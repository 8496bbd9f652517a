"""Models, data and helpers of `test_generate.py` that other tests use too."""



CALL = r"[a-z]{1,6}\(\d{0,3}\)"
PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer"},
                                           "tags": {"type": "array", "items": {"enum": ["a", "b"]}}},
          "required": ["name", "n"]}

"""Models, data and helpers of `test_languages.py` that other tests use too."""



EXPR = 'start: expr\nexpr: NUM | "(" expr op expr ")"\nop: "+" | "*"\nNUM: /[0-9]{1,3}/\n'
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {
    "type": "object", "required": ["city"],
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "minimum": 1}}}}}
TIME = {"name": "time"}

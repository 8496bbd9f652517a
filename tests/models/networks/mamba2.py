"""Models, data and helpers of `test_mamba2.py` that other tests use too."""



VOCABULARY = 97

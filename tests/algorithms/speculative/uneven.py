"""Models, data and helpers of `test_shapes.py` that other tests use too."""



UNEVEN = [[0], [1], [0, 0], [1, 0], [1, 1], [1, 0, 0], [1, 1, 0], [1, 0, 0, 0]]

"""Parts of a decoder beside attention and MLP that change the residual stream."""

"""Pytree dataclasses: definitions tell classes apart, so jit never runs the program of another class."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from decodax.common.struct import Struct, fields, static, struct


def kind(number: int) -> type[Any]:
    """A struct class of its own, with the same fields as every other one made here."""
    @struct
    class Kind(Struct):
        x: Array
        note: str = static(default="same")

        def value(self) -> Array:
            return self.x + number

    return Kind


def test_definitions_of_two_classes_with_equal_fields_differ():
    a, b = kind(0)(1.0), kind(1)(1.0)
    assert jax.tree.structure(a) != jax.tree.structure(b)
    assert jax.tree.structure(a) == jax.tree.structure(a.replace(x=2.0)) != jax.tree.structure(a.replace(note="other"))


def test_jit_runs_the_program_of_the_class_it_is_given():
    # with definitions that compare equal, about one class in seven met the program of another
    value = jax.jit(lambda struct: struct.value())
    kinds = [kind(number) for number in range(60)]
    assert [int(value(each(jnp.int32(0)))) for each in kinds] == list(range(60))


def test_the_class_is_no_declared_field():
    one = kind(0)(jnp.int32(3), note="here")
    assert [f.name for f in fields(one)] == ["x", "note"]
    assert "_class" not in repr(one)
    assert type(one.replace(x=jnp.int32(4))) is type(one) and len(jax.tree.leaves(one)) == 1


def test_a_struct_may_extend_another():
    @struct
    class Base(Struct):
        x: Array
        scale: int = static(default=2)

    @struct
    class Child(Base):
        y: Array = 0

    child = Child(jnp.int32(1), y=jnp.int32(5))
    assert jax.tree.structure(child) != jax.tree.structure(Base(jnp.int32(1)))
    assert type(jax.tree.map(lambda v: v + 1, child)) is Child and child.scale == 2

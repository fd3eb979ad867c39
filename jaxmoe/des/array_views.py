"""Arrays whose references are not counted, for compiled event loops.

A compiled loop that reaches its arrays through a tuple counts a reference up and down, atomically, at every look into
the tuple. In a loop of small steps that takes most of the time: 34 of 35 parts in `streaming_loop`.
"""

from typing import no_type_check

from numba.core import cgutils, types
from numba.extending import intrinsic


@intrinsic
@no_type_check
def uncounted(context, value):
    """Views of the arrays in `value`, a tuple of any depth, without reference counts: compiled code reads them faster.

    A view does not keep its memory alive, so the caller has to hold the arrays themselves until the last use.
    """

    @no_type_check
    def bare(context, builder, kind, value):
        if isinstance(kind, types.BaseTuple):
            parts = [bare(context, builder, each, builder.extract_value(value, at)) for at, each in enumerate(kind)]
            return context.make_tuple(builder, kind, parts)
        if not isinstance(kind, types.Array):
            return value
        array = context.make_array(kind)(context, builder, value)
        array.meminfo = cgutils.get_null_value(array.meminfo.type)
        array.parent = cgutils.get_null_value(array.parent.type)
        return array._getvalue()

    @no_type_check
    def build(context, builder, signature, arguments):
        return bare(context, builder, signature.args[0], arguments[0])

    return value(value), build

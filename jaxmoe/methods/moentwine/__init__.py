"""moentwine: token layouts, balancers that place copies anew, and weights that migrate on idle links."""

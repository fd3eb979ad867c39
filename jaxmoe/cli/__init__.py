"""The command `jaxmoe`: `app` has the verbs with their options, a module for each what it does."""

"""The `loraplex` command. One file a command; heavy imports happen inside the commands."""

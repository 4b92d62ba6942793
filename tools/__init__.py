"""Side products with a command each: plan, sweep, migrate and doctor. The other rooms do not import this one."""

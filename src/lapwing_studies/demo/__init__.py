"""What `lapwing demo` trains, fits and measures."""

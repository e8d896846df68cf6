"""What runs leave on disk: run directories, step logs, certificates, recorded trainers; how to find and check them."""

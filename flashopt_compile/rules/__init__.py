"""The rules that ship with the library, one small file each."""

//! Tests of the tools with valid images, and with every damage that specs/mapped-ram.md §6.5 names.

#![allow(clippy::print_stdout)] // seeds of random tests

mod sample;

mod broken_off;
mod cores;
mod differences;
mod ends;
mod hostile;
mod inspection;
mod mutants;
mod repairs;
mod verdicts;
mod verdicts_of_compressed;
mod verdicts_of_containers;
mod verdicts_of_content;

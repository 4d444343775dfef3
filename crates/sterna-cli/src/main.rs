//! The `sterna` command. Everything is in the library part, so that tests can call it.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    sterna_cli::main()
}

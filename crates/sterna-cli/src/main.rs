//! The `sterna` command. Its code is in the library, so that tests can call it.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    sterna_cli::main()
}

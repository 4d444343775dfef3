//! The `sterna` command for this crate's tests. It is built with the crate, so that it is never outdated.

fn main() -> std::process::ExitCode {
    sterna_cli::main()
}

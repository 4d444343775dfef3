//! The `sterna` command, built with this crate so that its tests never drive a stale one.

fn main() -> std::process::ExitCode {
    sterna_cli::main()
}

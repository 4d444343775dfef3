//! Commands for developers and CI. `cargo xtask test` runs the tests.
//!
//! Each command is a list of *parts*. A part runs, prints one line with its time, and passes, fails
//! or is skipped with a reason. The list continues after a failure, and the last lines report the
//! results of all parts. Only the standard library and serde_json are used. This program therefore
//! builds in seconds on a fresh machine and can install everything else.
#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command speaks to its user")]

mod bench;
mod demo;
mod fuzz;
mod imports;
mod interop;
mod lab;
mod layering;
mod licences;
mod machines;
mod parts;
mod process;
mod quick;
mod release;
mod roots;
mod setup;
mod soak;
mod sources;
mod spdx;
mod suite;
mod test;
mod workspace;

use std::process::ExitCode;

const USAGE: &str = "\
usage: cargo xtask COMMAND

  test [PART…]                  everything that must pass; --list names the parts
  test --quick                  format, rules, lints, and the tests that need no VM
  check                         formatting, lints, licences, layers, rules for sources
  fuzz [TARGET…] [--seconds N] [--jobs N]   explore with each fuzz target (or those named) for N seconds (default 60),
                                N targets at once (default 1); what is found goes into the stored inputs
  fuzz --merge [TARGET…]        put what earlier runs found into the stored inputs
  fuzz --status                 how long each target has run in all
  fuzz --check                  the fixed inputs, as the tests run them, with the programs that these have built
  soak [--count N] [--seed S]   N migrations cancelled, cut or killed (default 1000)
  soak --colo [--count N] [--seed S]   N protections disturbed (default 1000)
  soak --kills [--count N] [--seed S]   N primaries of protections killed or frozen as processes (default 1000)
  soak --postcopy|--resumed [--count N] [--seed S]   N migrations whose connections break (default 1000, 500)
  soak --cuts [--count N] [--seed S]   N precopies that are cut once and arrive, every page checked (default 200)
  bench [micro|sync|e2e|disk] [-- ARGS]   the benches (default: all four)
  bench converge [-- ARGS]      guests that write: forecasts, pauses, the largest dirty rate (--help: its options)
  bench linux [-- ARGS]         a Linux guest in the reference machine and in QEMU's microvm, in the lab (--only=PART, --quick)
  bench qemu [-- ARGS]          Sterna beside QEMU, in one run (--help: its options)
  bench colo [-- ARGS]          protected guests, QEMU's own way beside Sterna's: pauses, takeovers, goals (--help: its options)
  bench lazy [-- ARGS]          a guest's first instruction out of an image, `restore --lazy` beside QEMU's load (--help: its options)
  bench postcopy [-- ARGS]      page faults, the link's use, a guest that writes faster than it: QEMU's way beside Sterna's (--help: its options)
  bench same-host [-- ARGS]     moves to another process of the same host, QEMU's `cpr-transfer` beside Sterna's (--help: its options)
  bench compress [-- ARGS]      what compression between two relays saves on a slow link (--help: its options)
  bench live [-- ARGS]          the pause of a live save, and increments of a guest that runs (--help: its options)
  bench cuts [-- ARGS]          what is sent again when the network is away for seconds in a precopy (--help: its options)
  bench faults [-- ARGS]        guests that are served by page faults: latencies, the guest's own speed; first instruction of Sterna's own VM (--mib N: its memory)
  bench level [-- ARGS]         images saved with --level auto and with fixed levels on disks of several speeds (--mib N: the guest's memory)
  lab [KIND]                    tests that need real KVM (kvm) or an RDMA device (rdma), inside a VM that has it (default:
                                both); rdma-pair: from one such VM to another
  linux [--count N] [--seed S]  Debian's kernel with a root of packages in the reference machine, in that VM: it boots, works and moves;
                                with N only N moves in a row, with S others between them that are disturbed
  lab rdma --reliability[=N] [--seed=S]   N migrations over RDMA cancelled, cut or killed (default 60)
  roots [NAME]                  Debian roots with QEMU and libvirt, for the part `interop`: qemu, libvirt (sid),
                                qemu-bookworm, qemu-trixie, and guest for the lab's Linux guests; versitygw, an S3 server
                                (only if it is named: it needs Go)
  interop [SUBJECT…]            tests against real QEMU and libvirt alone (SUBJECT: a file in interop/tests/interop)
  demo-loop N [--built] [-- ARGS]   N demo migrations in a row, every one checked
  release-check [PART…]         what must hold before crates are published; --list names the parts
  release-check --update-api    store the public interfaces as they are now (api/)
  setup                         only install what is missing";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some((command, rest)) = arguments.split_first() else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    let done = match command.as_str() {
        "test" => test::command(rest),
        "check" => test::check_command(rest),
        "fuzz" => fuzz::command(rest),
        "soak" => soak::command(rest),
        "bench" => bench::command(rest),
        "lab" => lab::command(rest),
        "linux" => lab::linux_command(rest),
        "roots" => roots::command(rest),
        "interop" => interop::command(rest),
        "demo-loop" => demo::command(rest),
        "setup" => setup::command(rest),
        "release-check" => release::command(rest),
        "help" | "--help" | "-h" => {
            println!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        other => Err(process::Failure::Usage(format!("there is no command `{other}`"))),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(process::Failure::Usage(why)) => {
            eprintln!("xtask: {why}\n\n{USAGE}");
            ExitCode::from(2)
        }
        Err(process::Failure::Failed(why)) => {
            eprintln!("xtask: {why}");
            ExitCode::FAILURE
        }
    }
}

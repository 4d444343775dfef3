//! Shared by the benches that time whole programs: machines in processes of their own, and their CPU time.
//! The same code drives QEMU's and Sterna's machines over QMP.

pub mod before;
pub mod clock;
pub mod forwarder;
pub mod goal;
pub mod link;
pub mod machines;
pub mod markdown;
pub mod peer;
pub mod raw;
pub mod s3;
pub mod words;

/// A description of what failed.
pub type Failure = String;

/// Exit code of a bench. A failure is written to standard error.
#[allow(clippy::print_stderr, reason = "a program's last word")]
pub fn exit(result: Result<(), Failure>) -> std::process::ExitCode {
    match result {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{why}");
            std::process::ExitCode::FAILURE
        }
    }
}

//! The errors of this crate.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crate::xdr::XdrError;

/// A call to libvirt that failed. Unless the variant says otherwise, the domain is unchanged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LibvirtError {
    /// No socket of the daemon can be used, and `virsh` cannot be run.
    #[error(
        "cannot reach libvirt for {uri}: {}; and virsh: {virsh}. Check that libvirtd or virtqemud runs, that this user may \
         use its socket, or install virsh",
        sockets(tried)
    )]
    Unreachable {
        /// The connection URI.
        uri: String,
        /// The sockets that were tried, with their errors.
        tried: Vec<(PathBuf, String)>,
        /// Why `virsh` cannot be run.
        virsh: io::Error,
    },
    /// The daemon wants an authentication that this client does not know.
    #[error("libvirt at {} wants an authentication (types {offered:?}) that only virsh knows", socket.display())]
    Authentication {
        /// The daemon's socket.
        socket: PathBuf,
        /// The types that the daemon accepts. 1: SASL, 2: polkit.
        offered: Vec<u32>,
    },
    /// The connection was cancelled. Nothing was changed.
    #[error("interrupted while connecting to libvirt")]
    Cancelled,
    /// The connection failed during a call. The daemon may have executed it.
    #[error("libvirt's connection failed during {call}: {error}")]
    Io {
        /// Name of the call.
        call: &'static str,
        /// The reason from the operating system.
        error: io::Error,
    },
    /// The daemon closed the connection. It may have executed the call.
    #[error("libvirt closed the connection during {call}. Check the daemon's log")]
    Closed {
        /// Name of the call.
        call: &'static str,
    },
    /// No reply arrived within the limit. The daemon may still execute the call.
    #[error(
        "libvirt did not answer {call} within {limit:?}. Another job may hold the domain: `virsh domjobinfo` shows it"
    )]
    TimedOut {
        /// Name of the call.
        call: &'static str,
        /// The limit of the wait.
        limit: Duration,
    },
    /// libvirt refused the call.
    #[error("libvirt refused {call} (program {program:#x}, procedure {procedure}, error {code}): {message}")]
    Refused {
        /// Name of the call.
        call: &'static str,
        /// Number of the program.
        program: u32,
        /// Number of the procedure.
        procedure: i32,
        /// libvirt's error number.
        code: i32,
        /// libvirt's text.
        message: String,
    },
    /// A reply has another form than the procedure defines. The connection cannot be used any more.
    #[error(
        "libvirt's reply to {call} (program {program:#x}, procedure {procedure}) cannot be read: {error}"
    )]
    Malformed {
        /// Name of the call.
        call: &'static str,
        /// Number of the program.
        program: u32,
        /// Number of the procedure.
        procedure: i32,
        /// What is wrong.
        error: XdrError,
    },
    /// The received bytes are no packet of libvirt's RPC. The connection cannot be used any more.
    #[error("the daemon's bytes during {call} are not libvirt's RPC: {why}")]
    NotRpc {
        /// Name of the call.
        call: &'static str,
        /// What is wrong.
        why: String,
    },
    /// The domain has no QEMU process.
    #[error("the domain {name} is not running: `virsh start {name}` starts it")]
    NotRunning {
        /// Name of the domain.
        name: String,
    },
    /// `virsh` failed.
    #[error("`{command}` failed: {message}")]
    Virsh {
        /// The command line.
        command: String,
        /// Its message, or its status.
        message: String,
    },
    /// The daemon runs on another host, so no descriptor can be passed to QEMU.
    #[error(
        "files cannot be passed to {address}: its libvirt is on another host. Run the command on that host"
    )]
    OtherHost {
        /// Address of the domain.
        address: String,
    },
    /// QEMU's answer is not what its version defines.
    #[error("{address}: {command} answered {answer}")]
    Answer {
        /// Address of the domain.
        address: String,
        /// The QMP command.
        command: String,
        /// The answer, or QEMU's error.
        answer: String,
    },
}

fn sockets(tried: &[(PathBuf, String)]) -> String {
    match tried {
        [] => "it is not on this host".to_owned(),
        tried => {
            let each = tried.iter().map(|(path, error)| format!("{}: {error}", path.display()));
            each.collect::<Vec<_>>().join(", ")
        }
    }
}

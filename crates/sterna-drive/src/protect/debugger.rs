//! Starts a guest that `cont` cannot start, by detaching a debugger: QEMU then resumes the guest.

use std::io::{self, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use super::ask::Ask;
use super::sockets::SocketDirectory;
use crate::error::DriveError;

/// How long QEMU may take to answer the debugger.
const ANSWER_LIMIT: Duration = Duration::from_secs(2);
/// GDB's remote protocol: detach, with its checksum. The `+` acknowledges a possible earlier packet of QEMU.
const DETACH: &[u8] = b"+$D#44";
/// QEMU's answer to a successful detach.
const DONE: &[u8] = b"$OK#9a";
/// Limit for QEMU's answer; larger than everything that QEMU sends before it.
const MOST_BYTES: u64 = 64 << 10;

/// Connects to QEMU as a debugger and detaches. The debugger port is closed afterwards, also after an error.
/// QEMU has only one such port, so an operator's debugger port is closed, too.
///
/// `parent`: a directory in which QEMU can create a socket. None: the directory of temporary files.
///
/// # Errors
/// QEMU cannot create a socket there, or does not answer.
pub(super) fn start_guest(ask: &mut Ask<'_>, parent: Option<&Path>) -> Result<(), DriveError> {
    let failed = |error| DriveError::file("make", "a directory for the debugger's socket", error);
    let directory = SocketDirectory::new(parent).map_err(failed)?;
    let path = directory.path().join("debugger");
    // In QEMU's options a comma ends a value unless it is doubled.
    let place = path.display().to_string().replace(',', ",,");
    let mut command = |line: String| ask("human-monitor-command", json!({ "command-line": line }));
    let said = command(format!("gdbserver unix:{place},server=on,wait=off"))?;
    let detached = detach(&path);
    command("gdbserver none".to_owned())?;
    detached.map_err(|error| {
        DriveError::Failed(format!(
            "QEMU's port for debuggers, which starts the guest: {error}{}",
            told(&said)
        ))
    })
}

fn detach(path: &Path) -> io::Result<()> {
    let mut stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(ANSWER_LIMIT))?;
    stream.set_write_timeout(Some(ANSWER_LIMIT))?;
    stream.write_all(DETACH)?;
    let mut last = Vec::new();
    for byte in BufReader::new(stream.take(MOST_BYTES)).bytes() {
        last.push(byte?);
        if last.ends_with(DONE) {
            return Ok(());
        }
    }
    Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it was closed without an answer"))
}

fn told(said: &Value) -> String {
    match said.as_str().map(str::trim) {
        Some(text) if !text.is_empty() => format!(" (QEMU: {text})"),
        _ => String::new(),
    }
}

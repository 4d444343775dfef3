//! The NBD server of one connection. It answers requests one after the other.

use std::sync::Arc;
use std::time::Duration;

use sterna::error::{BadConnection, MigrationError, Misbehaviour, ProtectionDifference, UnknownDisk};
use sterna_transport::{Channel, IoPart};
use sterna_wire::nbd::{
    ClientOption, CommandKind, Export, GREETING, OptionReply, Request, client_flags, export_name_reply,
    option_reply, reply,
};

use super::buffered::Disk;

/// Time limit for each step of the handshake.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Most options of one client.
const OPTIONS: usize = 64;

/// Error numbers of the NBD protocol.
const EIO: u32 = 5;
const ENOSPC: u32 = 28;

/// Performs the NBD handshake: the client selects a disk. Returns `None` if the client aborts.
pub(super) fn shake_hands(
    channel: &Arc<Channel>,
    disks: &[Arc<Disk>],
) -> Result<Option<Arc<Disk>>, MigrationError> {
    channel.set_stall_limit(Some(HANDSHAKE));
    channel.write_all(&GREETING)?;
    let wire = MigrationError::wire("disk");
    let mut flags = [0; 4];
    channel.read_exact(&mut flags)?;
    let has_zeroes = client_flags(&flags).map_err(&wire)?.is_some_and(|(zeroes, _)| zeroes);
    for _ in 0..OPTIONS {
        let option = read_option(channel)?;
        let number = option.number();
        let mut answer = Vec::new();
        match option {
            ClientOption::ExportName(name) => {
                let disk = find(disks, &name).ok_or_else(|| unknown(channel, disks, &name))?;
                disk.take(channel)?;
                export_name_reply(export(&disk), has_zeroes, &mut answer);
                channel.write_all(&answer)?;
                return Ok(Some(disk));
            }
            ClientOption::Export { name, is_go } => {
                let disk = find(disks, &name).ok_or_else(|| unknown_disk(disks, &name).to_string()).and_then(
                    |disk| {
                        let taken = if is_go { disk.take(channel) } else { Ok(()) };
                        taken.map(|()| disk).map_err(|why| why.to_string())
                    },
                );
                match &disk {
                    Ok(disk) => {
                        option_reply(number, &OptionReply::Export(export(disk)), &mut answer);
                        option_reply(number, &OptionReply::BlockSize, &mut answer);
                        option_reply(number, &OptionReply::Ack, &mut answer);
                    }
                    Err(why) => option_reply(number, &OptionReply::UnknownExport(why), &mut answer),
                }
                channel.write_all(&answer)?;
                match disk {
                    Ok(disk) if is_go => return Ok(Some(disk)),
                    _ => continue,
                }
            }
            ClientOption::List => {
                for disk in disks {
                    option_reply(number, &OptionReply::Server(disk.name()), &mut answer);
                }
                option_reply(number, &OptionReply::Ack, &mut answer);
            }
            ClientOption::Abort => {
                option_reply(number, &OptionReply::Ack, &mut answer);
                // A failed write is ignored, because the client may close the connection without reading the answer.
                let _ = channel.write_all(&answer);
                return Ok(None);
            }
            ClientOption::Unknown(_) => option_reply(number, &OptionReply::Unsupported, &mut answer),
        }
        channel.write_all(&answer)?;
    }
    let why = BadConnection::TooManyOptions { most: OPTIONS };
    Err(Misbehaviour::Connection { peer: channel.peer().to_owned(), why }.into())
}

/// Answers requests until the connection ends. Returns the reason of the end.
pub(super) fn serve(channel: &Channel, disk: &Disk) -> MigrationError {
    channel.set_stall_limit(None);
    let mut buffer = Vec::new();
    loop {
        match serve_one(channel, disk, &mut buffer) {
            Ok(true) => {}
            Ok(false) => return lost(disk, "the primary has taken the disk out"),
            Err(why @ (MigrationError::Transport(_) | MigrationError::Ended(_))) => {
                return lost(disk, &why.to_string());
            }
            Err(why) => return why,
        }
    }
}

/// Answers one request. Returns false if the client has disconnected.
fn serve_one(channel: &Channel, disk: &Disk, buffer: &mut Vec<u8>) -> Result<bool, MigrationError> {
    let name = format!("disk {}", disk.name());
    let mut head = [0; Request::BYTES];
    channel.read_exact(&mut head)?;
    let decoded = Request::decode(&head, disk.len_bytes()).map_err(MigrationError::wire(&name))?;
    let Some((request, _)) = decoded else {
        return Err(MigrationError::Internal("an NBD request of full length is incomplete".to_owned()));
    };
    let Request { kind, cookie, offset, length } = request;
    let mut answer = Vec::new();
    let done = match kind {
        CommandKind::Disconnect => return Ok(false),
        CommandKind::Read => {
            buffer.resize(length as usize, 0);
            if disk.read(offset, buffer).is_ok() {
                reply(cookie, 0, &mut answer);
                channel.write_parts(&[IoPart::Bytes(&answer), IoPart::Bytes(buffer)])?;
            } else {
                reply(cookie, EIO, &mut answer);
                channel.write_all(&answer)?;
            }
            return Ok(true);
        }
        CommandKind::Write => {
            buffer.resize(length as usize, 0);
            channel.read_exact(buffer)?;
            disk.write(offset, buffer)
        }
        CommandKind::Trim | CommandKind::WriteZeroes => disk.zero(offset, length.into()),
        // Nothing to do: buffered writes are in memory only. A sync of the file would prolong the pause, because the
        // paused guest waits for the answer.
        CommandKind::Flush => Ok(()),
    };
    let error = match &done {
        Ok(()) => 0,
        Err(MigrationError::DiskBufferFull { .. }) => ENOSPC,
        Err(_) => EIO,
    };
    reply(cookie, error, &mut answer);
    channel.write_all(&answer)?;
    // A write that failed is missing here, so the connection ends, and later requests are not served.
    done.map(|()| true)
}

fn read_option(channel: &Channel) -> Result<ClientOption, MigrationError> {
    let mut bytes = vec![0; 16];
    channel.read_exact(&mut bytes)?;
    loop {
        let wire = MigrationError::wire("disk");
        if let Some((option, _)) = ClientOption::decode(&bytes).map_err(wire)? {
            return Ok(option);
        }
        // The decoder has already checked the length.
        let length = u32::from_be_bytes([bytes[12], bytes[13], bytes[14], bytes[15]]) as usize;
        bytes.resize(16 + length, 0);
        channel.read_exact(&mut bytes[16..])?;
    }
}

fn find(disks: &[Arc<Disk>], name: &str) -> Option<Arc<Disk>> {
    disks.iter().find(|disk| disk.name() == name).cloned()
}

fn export(disk: &Disk) -> Export {
    Export { len_bytes: disk.len_bytes() }
}

fn unknown_disk(disks: &[Arc<Disk>], name: &str) -> UnknownDisk {
    UnknownDisk::new(name, disks.iter().map(|disk| disk.name().to_owned()).collect())
}

fn unknown(channel: &Channel, disks: &[Arc<Disk>], name: &str) -> MigrationError {
    let disk = unknown_disk(disks, name);
    ProtectionDifference::UnknownDisk { peer: channel.peer().to_owned(), disk }.into()
}

fn lost(disk: &Disk, why: &str) -> MigrationError {
    MigrationError::DiskLost { disk: disk.name().to_owned(), why: why.to_owned() }
}

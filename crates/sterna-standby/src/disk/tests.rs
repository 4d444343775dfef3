//! Tests of disks over a connection, with the requests of a primary's QEMU.

use std::io;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use sterna_wire::nbd::{CommandKind, GREETING, Request};

use super::*;

const BYTES: usize = 1 << 20;

struct Memory(Mutex<Vec<u8>>);

impl DiskFile for Memory {
    fn len_bytes(&self) -> u64 {
        BYTES as u64
    }
    fn read_at(&self, to: &mut [u8], at: u64) -> io::Result<()> {
        to.copy_from_slice(&self.0.lock()[at as usize..][..to.len()]);
        Ok(())
    }
    fn write_at(&self, from: &[u8], at: u64) -> io::Result<()> {
        self.0.lock()[at as usize..][..from.len()].copy_from_slice(from);
        Ok(())
    }
    fn make_zero(&self, at: u64, length: u64) -> io::Result<()> {
        self.0.lock()[at as usize..][..length as usize].fill(0);
        Ok(())
    }
    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
    fn release(&self) -> io::Result<()> {
        Ok(())
    }
}

struct Lab {
    file: Arc<Memory>,
    disks: Arc<Disks>,
    lost: Arc<Mutex<Option<MigrationError>>>,
}

/// The primary's end of a connection.
struct Client(Channel);

impl Lab {
    fn new(limit_bytes: u64) -> Self {
        let file = Arc::new(Memory(Mutex::new(vec![0; BYTES])));
        let disk = StandbyDisk { name: "q0".to_owned(), file: file.clone() };
        let disks = Arc::new(Disks::new(vec![disk], limit_bytes));
        let lost = Arc::new(Mutex::default());
        let tell = Arc::clone(&lost);
        disks.on_lost(move |why| *tell.lock() = Some(why));
        Self { file, disks, lost }
    }

    fn connect(&self) -> Client {
        let (ours, theirs) = Channel::pair().unwrap();
        self.disks.serve(&Arc::new(ours)).unwrap();
        let mut greeting = [0; 18];
        theirs.read_exact(&mut greeting).unwrap();
        assert_eq!(greeting, GREETING);
        theirs.write_all(&[0, 0, 0, 3]).unwrap();
        let go = b"IHAVEOPT\0\0\0\x07\0\0\0\x08\0\0\0\x02q0\0\0";
        theirs.write_all(go).unwrap();
        // Replies to EXPORT, BLOCK_SIZE and ACK.
        theirs.read_exact(&mut [0; 20 + 12 + 20 + 14 + 20]).unwrap();
        Client(theirs)
    }

    fn byte(&self, at: usize) -> u8 {
        self.file.0.lock()[at]
    }

    fn wait_for_loss(&self) -> MigrationError {
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_secs(60) {
            if let Some(why) = self.lost.lock().clone() {
                return why;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        panic!("nobody was told");
    }
}

impl Client {
    fn ask(&self, kind: CommandKind, offset: u64, length: u32, data: &[u8]) -> u32 {
        let mut bytes = Vec::new();
        Request { kind, cookie: *b"01234567", offset, length }.encode(&mut bytes);
        self.0.write_all(&[&bytes, data].concat()).unwrap();
        let mut reply = [0; 16];
        self.0.read_exact(&mut reply).unwrap();
        assert_eq!((&reply[..4], &reply[8..]), (&[0x67, 0x44, 0x66, 0x98][..], &b"01234567"[..]));
        u32::from_be_bytes([reply[4], reply[5], reply[6], reply[7]])
    }

    fn write(&self, at: u64, value: u8) -> u32 {
        self.ask(CommandKind::Write, at, 512, &[value; 512])
    }

    fn read(&self, at: u64) -> u8 {
        assert_eq!(self.ask(CommandKind::Read, at, 1, &[]), 0);
        let mut byte = [0];
        self.0.read_exact(&mut byte).unwrap();
        byte[0]
    }
}

#[test]
fn file_has_what_a_held_checkpoint_wrote_and_nothing_else() {
    let lab = Lab::new(1 << 20);
    let client = lab.connect();
    client.write(0, 1);
    assert_eq!(lab.byte(0), 1, "the seeding goes to the file");
    lab.disks.begin_epochs().unwrap();

    client.write(0, 2);
    client.write(4096, 3);
    assert_eq!((lab.byte(0), lab.byte(4096)), (1, 0), "not before it is held");
    assert_eq!((client.read(0), client.read(4096), client.read(8192)), (2, 3, 0), "reads see it");
    assert_eq!(client.ask(CommandKind::Flush, 0, 0, &[]), 0);
    lab.disks.check().unwrap();
    lab.disks.end_epoch();
    client.write(0, 4);
    client.ask(CommandKind::WriteZeroes, 4096, 100, &[]);
    assert_eq!((client.read(0), client.read(4096), client.read(4196)), (4, 0, 3));
    lab.disks.commit().unwrap();
    assert_eq!((lab.byte(0), lab.byte(4096)), (2, 3));
    lab.disks.commit().unwrap();
    lab.disks.check().unwrap();

    lab.disks.end_epoch();
    client.write(512, 5);
    lab.disks.take_over().unwrap();
    assert_eq!((lab.byte(0), lab.byte(4096), lab.byte(4196), lab.byte(512)), (4, 0, 3, 0));
    assert_eq!(lab.disks.budget.used(), 0);
    assert!(client.0.read_some(&mut [0]).is_ok_and(|length| length == 0), "it is closed");
    assert!(lab.lost.lock().is_none(), "what this side has ended is no loss");
}

#[test]
fn more_than_the_limit_ends_the_protection_by_name_and_keeps_what_is_held() {
    let lab = Lab::new(3 << 10);
    let client = lab.connect();
    lab.disks.begin_epochs().unwrap();
    client.write(0, 1);
    lab.disks.check().unwrap();
    lab.disks.end_epoch();
    lab.disks.commit().unwrap();

    let refused = (1..10).find(|at| client.write(at * 1024, 2) != 0).unwrap();

    assert!(refused > 1);
    assert!(matches!(lab.wait_for_loss(), MigrationError::DiskBufferFull { limit_bytes: 3072, .. }));
    assert!(lab.disks.check().is_err());
    lab.disks.take_over().unwrap();
    assert_eq!((lab.byte(0), lab.byte(1024)), (1, 0));
}

#[test]
fn checkpoint_is_not_held_when_a_connection_is_gone() {
    for says_so in [true, false] {
        let lab = Lab::new(1 << 20);
        let client = lab.connect();
        lab.disks.begin_epochs().unwrap();
        lab.disks.check().unwrap();
        if says_so {
            let mut bytes = Vec::new();
            Request { kind: CommandKind::Disconnect, cookie: [0; 8], offset: 0, length: 0 }
                .encode(&mut bytes);
            client.0.write_all(&bytes).unwrap();
            lab.wait_for_loss();
        }
        drop(client);
        // The check fails whether or not the server's thread has noticed the closed connection.
        assert!(matches!(lab.disks.check(), Err(MigrationError::DiskLost { .. })));
        assert!(matches!(lab.wait_for_loss(), MigrationError::DiskLost { .. }));
        let (ours, theirs) = Channel::pair().unwrap();
        lab.disks.serve(&Arc::new(ours)).unwrap();
        theirs.read_exact(&mut [0; 18]).unwrap();
        theirs.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x07\0\0\0\x08\0\0\0\x02q0\0\0").unwrap();
        let mut reply = [0; 20];
        theirs.read_exact(&mut reply).unwrap();
        assert_eq!(reply[12..16], [0x80, 0, 0, 6], "it does not come back");
        assert!(lab.disks.check().is_err());
    }
}

#[test]
fn request_outside_of_the_disk_ends_the_connection_and_names_the_rule() {
    let lab = Lab::new(1 << 20);
    let client = lab.connect();
    lab.disks.begin_epochs().unwrap();
    let mut bytes = Vec::new();
    Request { kind: CommandKind::Write, cookie: [0; 8], offset: 1 << 63, length: 1 }.encode(&mut bytes);
    client.0.write_all(&bytes).unwrap();

    let why = lab.wait_for_loss().to_string();

    assert!(why.contains("disk q0") && why.contains("outside of a disk"), "{why}");
}

#[test]
fn guest_is_not_taken_whose_disk_did_not_come() {
    let lab = Lab::new(1 << 20);
    let why = lab.disks.begin_epochs().unwrap_err().to_string();
    assert!(why.contains("--disk"), "{why}");
    let first = lab.connect();
    let second = lab.connect();
    assert!(first.0.read_some(&mut [0]).is_ok_and(|length| length == 0), "the newest counts");
    second.write(0, 1);
    lab.disks.begin_epochs().unwrap();
}

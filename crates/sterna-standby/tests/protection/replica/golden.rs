//! A complete session of a QEMU 11.1.3 and a standby, recorded in both directions (`session_is_recorded` of
//! `interop/tests/interop/qemu_colo/golden.rs`). The guest is a `pc` with 8 MiB that sends network frames; the session
//! uses the main channel alone.
//!
//! Format of the file, compressed with gzip: number of the last checkpoint (u64), length (u64) and digest (u64) of
//! the primary's RAM at that checkpoint, then pieces. Each piece is 0 for QEMU or 1 for the standby, a length (u32),
//! and bytes.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use super::*;

struct Session {
    checkpoints: u64,
    ram_bytes: usize,
    digest: u64,
    said: Vec<(u8, Vec<u8>)>,
}

fn session() -> Session {
    let packed = include_bytes!("../../vectors/colo-session.gz");
    let mut bytes = Vec::new();
    flate2::read::GzDecoder::new(&packed[..]).read_to_end(&mut bytes).unwrap();
    let number = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
    let (mut said, mut at) = (Vec::new(), 24);
    while at < bytes.len() {
        let length = u32::from_be_bytes(bytes[at + 1..at + 5].try_into().unwrap()) as usize;
        said.push((bytes[at], bytes[at + 5..at + 5 + length].to_vec()));
        at += 5 + length;
    }
    Session { checkpoints: number(0), ram_bytes: number(8) as usize, digest: number(16), said }
}

/// FNV-1a, 64 bits.
fn digest(bytes: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

struct Replayed {
    standby: Standby,
    _directory: TempDir,
}

/// A standby that receives the first `most` bytes of QEMU's session. Asserts that it answers as recorded.
fn replay(session: &Session, most: usize) -> Replayed {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("standby");
    let (params, capabilities) = settings(0);
    let at = Address::Unix(path.clone());
    let standby = Standby::listen(&at, &options(), params, capabilities, Arc::new(())).expect("listening");
    let mut wire = UnixStream::connect(path).unwrap();
    wire.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let mut left = most;
    for (index, (who, bytes)) in session.said.iter().enumerate() {
        if *who == 0 {
            let length = bytes.len().min(left);
            wire.write_all(&bytes[..length]).unwrap();
            left -= length;
            if length < bytes.len() {
                break;
            }
        } else {
            let mut answer = vec![0; bytes.len()];
            wire.read_exact(&mut answer).unwrap();
            assert_eq!(&answer, bytes, "piece {index}");
        }
    }
    // The primary fails.
    drop(wire);
    Replayed { standby, _directory: directory }
}

#[test]
fn recorded_qemu_hears_the_same_answers_and_its_last_checkpoint_is_its_ram() {
    let session = session();
    let replayed = replay(&session, usize::MAX);
    let why = lost(&replayed.standby);
    assert!(matches!(why, MigrationError::Ended(Ending::BetweenCheckpoints)), "{why}");
    assert_eq!(replayed.standby.statistics().checkpoints, session.checkpoints);

    let directory = tempfile::tempdir().unwrap();
    let taken = replayed.standby.takeover(&plan(&directory), &OperatorsWord).expect("taken over");

    assert_eq!(taken.checkpoint.number, session.checkpoints);
    let image = Image::open(&taken.path).expect("an image");
    let blocks = &image.shape().ram.blocks;
    let block = blocks.iter().position(|block| block.name == "ram0").expect("the guest's RAM");
    let mut ram = vec![0; session.ram_bytes];
    image.mapped().unwrap().read(block, 0, &mut ram).unwrap();
    assert_eq!(digest(&ram), session.digest);
}

#[test]
fn recorded_qemu_that_is_cut_off_anywhere_leaves_a_whole_checkpoint() {
    let session = session();
    let all: usize = session.said.iter().filter(|(who, _)| *who == 0).map(|(_, bytes)| bytes.len()).sum();
    // The seeding is most of the session; checkpoints are at its end.
    let mut random = fastrand::Rng::with_seed(23);
    let mut before = 0;
    let mut cuts: Vec<usize> = (0..24).map(|_| all - random.usize(1..all / 8)).collect();
    cuts.sort_unstable();
    for cut in cuts {
        let replayed = replay(&session, cut);
        lost(&replayed.standby);
        let held = replayed.standby.statistics().checkpoints;
        assert!((before..=session.checkpoints).contains(&held), "{held} after {cut} of {all} bytes");
        before = held;
        if replayed.standby.held().is_some() {
            let directory = tempfile::tempdir().unwrap();
            let taken = replayed.standby.takeover(&plan(&directory), &OperatorsWord).expect("taken over");
            assert_eq!(taken.checkpoint.number, held);
        }
    }
}

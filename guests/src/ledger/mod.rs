//! Ledger: a bare-metal guest that outputs each record to three devices. For each record it writes a virtio
//! disk, sends a packet, and writes a line to the serial port. Before it overwrites a place on the disk, it
//! reads the place and compares the content with its memory.
//!
//! Each place on the disk also has a page of memory. The page contains the record in one round over the
//! places and is zero in the next. The guest checks the page before it changes it. So the guest ends if a
//! page kept its content where zeros are due.
//!
//! An observer outside can therefore tell the guest's progress from each output. The guest itself ends if
//! its disk and its memory are not from one moment.
//!
//! The image is flat 64-bit code like [`crate::tide`]'s: position independent, loaded and entered at 1 MiB,
//! with 64 MiB of RAM mapped one to one. It needs a virtio-mmio disk of [`DISK_BYTES`] that reads as zero
//! at [`DISK_ADDRESS`], and a network card at [`CARD_ADDRESS`]. Only vCPU 0 works.

mod blob;

/// Address of the disk's registers: place 0 of the reference machine.
pub const DISK_ADDRESS: u64 = 0xd000_0000;
/// Address of the network card's registers: place 1 of the reference machine.
pub const CARD_ADDRESS: u64 = 0xd000_1000;
/// Size of the disk in bytes.
pub const DISK_BYTES: u64 = SLOTS * SLOT_BYTES;
/// Number of records that the disk contains at a time.
pub const SLOTS: u64 = 64;
/// Distance between two records on the disk, in bytes.
pub const SLOT_BYTES: u64 = 512 * SECTORS_PER_SLOT;
/// Not a power of two, so that the positions of records in a copy's blocks vary.
const SECTORS_PER_SLOT: u64 = 129;
/// Size of a record on the disk, in bytes.
pub const RECORD_BYTES: usize = 512;
/// The Ethernet type of the guest's packets, which is reserved for experiments.
pub const ETHERTYPE: [u8; 2] = [0x88, 0xb5];
/// Offset of the record's number in a packet. The number has eight bytes, little-endian.
pub const NUMBER_AT: usize = 14;
/// Exit code of the guest if its disk and its memory are not from one moment.
pub const WRONG: u8 = 0xee;
/// Factor by which the digest is multiplied before a number is added.
const FACTOR: u64 = 6_364_136_223_846_793_005;

/// The flat image, to be loaded at 1 MiB.
pub fn image() -> Vec<u8> {
    blob::flat().to_vec()
}

/// The number of the record in a packet; `None` for a packet of another sender.
pub fn number_of_packet(packet: &[u8]) -> Option<u64> {
    let is_ours = packet.get(12..14)? == ETHERTYPE;
    let number = packet.get(NUMBER_AT..NUMBER_AT + 8)?.try_into().ok()?;
    is_ours.then(|| u64::from_le_bytes(number))
}

/// The number of the last record on a disk. The other records must directly precede it.
///
/// # Errors
/// A record is incomplete, or does not fit the others.
pub fn last_on_disk(disk: &[u8]) -> Result<u64, String> {
    let record = |slot: u64| -> Result<(u64, u64), String> {
        let at = (slot * SLOT_BYTES) as usize;
        let bytes = disk.get(at..at + RECORD_BYTES).ok_or("the disk is too short")?;
        let words: Vec<u64> = bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
        let is_whole = words.chunks(2).all(|pair| pair == &words[..2]);
        is_whole.then_some((words[0], words[1])).ok_or(format!("record {slot} is torn"))
    };
    let records: Vec<_> = (0..SLOTS).map(record).collect::<Result<_, _>>()?;
    let last = records.iter().map(|(number, _)| *number).max().unwrap_or(0);
    let mut digest = 0u64;
    for number in 1..=last {
        digest = digest.wrapping_mul(FACTOR).wrapping_add(number);
        let found = records[(number % SLOTS) as usize];
        if number + SLOTS > last && found != (number, digest) {
            return Err(format!(
                "the disk's last record is {last}, and where {number} was due it has {found:?}"
            ));
        }
    }
    Ok(last)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(disk: &mut [u8], number: u64, digest: u64) {
        let at = ((number % SLOTS) * SLOT_BYTES) as usize;
        let pair = [number.to_le_bytes(), digest.to_le_bytes()].concat();
        disk[at..at + RECORD_BYTES].copy_from_slice(&pair.repeat(RECORD_BYTES / 16));
    }

    #[test]
    fn disk_of_one_moment_is_told_from_others() {
        let mut disk = vec![0; DISK_BYTES as usize];
        assert_eq!(last_on_disk(&disk), Ok(0));
        let (mut digest, mut before) = (0u64, Vec::new());
        for number in 1..=200 {
            digest = digest.wrapping_mul(FACTOR).wrapping_add(number);
            before = disk.clone();
            put(&mut disk, number, digest);
            assert_eq!(last_on_disk(&disk), Ok(number));
        }
        // A block from another moment, and a torn record.
        let mut mixed = disk.clone();
        let at = ((150 % SLOTS) * SLOT_BYTES) as usize;
        mixed[at..at + RECORD_BYTES].copy_from_slice(&[0; RECORD_BYTES]);
        assert!(last_on_disk(&mixed).is_err());
        let mut torn = before;
        put(&mut torn, 200, digest);
        torn[((200 % SLOTS) * SLOT_BYTES) as usize + 100] ^= 1;
        assert!(last_on_disk(&torn).is_err());
    }

    #[test]
    fn packets_of_others_have_no_number() {
        let mut packet = [0; 60];
        packet[12..14].copy_from_slice(&ETHERTYPE);
        packet[NUMBER_AT] = 7;
        assert_eq!(number_of_packet(&packet), Some(7));
        assert_eq!(number_of_packet(&packet[..20]), None);
        packet[12] = 8;
        assert_eq!(number_of_packet(&packet), None);
    }
}

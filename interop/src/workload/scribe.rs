//! A boot sector that writes numbered sectors. They go to the disk of the second IDE channel, by PIO.
//!
//! Number *n* goes to sector *n* mod 256, in all of its words. The number is in memory, followed by the last
//! number that the disk has acknowledged. If memory and disk are of the same moment, the disk has that number
//! and no number after the started one. A sector is written whenever bit 20 or a higher bit of the time-stamp
//! counter has changed.

use std::path::{Path, PathBuf};

use crate::Failure;

/// Size of the image, padded to a size that every disk controller accepts.
const IMAGE_BYTES: usize = 1 << 20;
/// Number of sectors that are written in turn.
const SECTORS: u32 = 256;
const SECTOR_BYTES: usize = 512;
/// Size of the written disk, in bytes.
pub const SCRIBE_BYTES: u64 = 1 << 20;

const LOADED: usize = 0x7c00;
// Offsets of words in the sector: the number that was started last, the counter at that time, and the number
// that was acknowledged last.
const NUMBER: usize = 0x1f0;
const DONE: usize = 0x1f8;

/// Physical address of a little-endian 32-bit word: the last number that was acknowledged.
pub const DONE_ADDRESS: u64 = (LOADED + DONE) as u64;

/// Paths of the disks in a machine's directory: the boot disk, and the written disk.
pub fn scribe_disks(directory: &Path) -> [PathBuf; 2] {
    ["scribe.img", "scribe.raw"].map(|name| directory.join(name))
}

/// Arguments for the devices, with block node `node` as the written disk.
pub fn scribe_devices(boot: &Path, node: &str) -> Vec<String> {
    let boot = format!("file={},format=raw,if=none,id=boot", boot.display());
    let device = format!("ide-hd,drive={node},bus=ide.1,id=data");
    ["-drive", &boot, "-device", "ide-hd,drive=boot,bus=ide.0,bootindex=0", "-device", &device]
        .map(str::to_owned)
        .to_vec()
}

/// Arguments for a machine that boots the sector. Its disk is the quorum `q0` over the node `p0`.
pub(super) fn arguments(directory: &Path) -> Result<Vec<String>, Failure> {
    let [boot, data] = scribe_disks(directory);
    let failed = |path: &Path, error: std::io::Error| format!("{}: {error}", path.display());
    let mut image = vec![0; IMAGE_BYTES];
    image[..512].copy_from_slice(&sector());
    std::fs::write(&boot, image).map_err(|error| failed(&boot, error))?;
    let file = std::fs::File::create(&data).map_err(|error| failed(&data, error))?;
    file.set_len(SCRIBE_BYTES).map_err(|error| failed(&data, error))?;
    let file = format!("file,node-name=f0,filename={}", data.display());
    let quorum = "quorum,node-name=q0,vote-threshold=1,read-pattern=fifo,children.0=p0";
    let blocks = ["-blockdev", &file, "-blockdev", "raw,node-name=p0,file=f0", "-blockdev", quorum];
    Ok(blocks.into_iter().map(str::to_owned).chain(scribe_devices(&boot, "q0")).collect())
}

/// The last number on a disk. All sectors must have their state of one moment.
///
/// # Errors
/// If the sectors are of different moments.
pub fn scribed(disk: &Path) -> Result<u32, Failure> {
    let bytes = std::fs::read(disk).map_err(|error| format!("{}: {error}", disk.display()))?;
    let mut numbers = Vec::new();
    for (index, sector) in bytes.chunks_exact(SECTOR_BYTES).take(SECTORS as usize).enumerate() {
        let mut words =
            sector.chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]));
        let number = words.next().unwrap_or(0);
        if words.any(|word| word != number) {
            return Err(format!("sector {index} says {number} and other numbers"));
        }
        if number > 0 && number % SECTORS != index as u32 {
            return Err(format!("sector {index} says {number}"));
        }
        numbers.push(number);
    }
    let last = numbers.iter().copied().max().unwrap_or(0);
    for number in last.saturating_sub(SECTORS - 1).max(1)..=last {
        let found = numbers[(number % SECTORS) as usize];
        if found != number {
            return Err(format!("{last} was written, and in the place of {number} stands {found}"));
        }
    }
    Ok(last)
}

fn sector() -> [u8; 512] {
    let mut sector = [0; 512];
    const { assert!(CODE.len() <= NUMBER) };
    sector[..CODE.len()].copy_from_slice(&CODE);
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
    sector
}

/// 16-bit code as bytes: it is short, and uses the addresses of the constants above.
#[rustfmt::skip]
const CODE: [u8; 118] = [
    0xfa,                               // cli
    0xfc,                               // cld
    0x31, 0xc0,                         // xor ax, ax
    0x8e, 0xd8,                         // mov ds, ax
    0x8e, 0xc0,                         // mov es, ax
    0x8e, 0xd0,                         // mov ss, ax
    0xbc, 0x00, 0x7c,                   // mov sp, LOADED
    0x0f, 0x31,                         // next: rdtsc
    0x66, 0x0f, 0xac, 0xd0, 0x14,       // shrd eax, edx, 0x14
    0x66, 0x3b, 0x06, 0xf4, 0x7d,       // cmp eax, dword [LOADED + LAST]
    0x74, 0xf2,                         // je next
    0x66, 0xa3, 0xf4, 0x7d,             // mov [LOADED + LAST], eax
    0x66, 0xff, 0x06, 0xf0, 0x7d,       // inc dword [LOADED + NUMBER]
    0x66, 0xa1, 0xf0, 0x7d,             // mov eax, [LOADED + NUMBER]
    0xbf, 0x00, 0x80,                   // mov di, BUFFER
    0xb9, 0x80, 0x00,                   // mov cx, 0x80
    0x66, 0xf3, 0xab,                   // rep stosd
    0xba, 0x77, 0x01,                   // mov dx, 0x177
    0xec,                               // w1: in al, dx
    0xa8, 0x80,                         // test al, 0x80
    0x75, 0xfb,                         // jne w1
    0x4a,                               // dec dx
    0xb0, 0xe0,                         // mov al, 0xe0
    0xee,                               // out dx, al
    0xba, 0x72, 0x01,                   // mov dx, 0x172
    0xb0, 0x01,                         // mov al, 0x1
    0xee,                               // out dx, al
    0x42,                               // inc dx
    0xa0, 0xf0, 0x7d,                   // mov al, [LOADED + NUMBER]
    0xee,                               // out dx, al
    0x42,                               // inc dx
    0x31, 0xc0,                         // xor ax, ax
    0xee,                               // out dx, al
    0x42,                               // inc dx
    0xee,                               // out dx, al
    0xba, 0x77, 0x01,                   // mov dx, 0x177
    0xb0, 0x30,                         // mov al, 0x30
    0xee,                               // out dx, al
    0xec,                               // w2: in al, dx
    0xa8, 0x08,                         // test al, 0x8
    0x74, 0xfb,                         // je w2
    0xba, 0x70, 0x01,                   // mov dx, 0x170
    0xbe, 0x00, 0x80,                   // mov si, BUFFER
    0xb9, 0x00, 0x01,                   // mov cx, 0x100
    0xf3, 0x6f,                         // rep outsw
    0xba, 0x77, 0x01,                   // mov dx, 0x177
    0xec,                               // w3: in al, dx
    0xa8, 0x80,                         // test al, 0x80
    0x75, 0xfb,                         // jne w3
    0x66, 0xa1, 0xf0, 0x7d,             // mov eax, [LOADED + NUMBER]
    0x66, 0xa3, 0xf8, 0x7d,             // mov [LOADED + DONE], eax
    0xeb, 0x97,                         // jmp next
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disk_of_one_moment_is_told_from_one_of_two() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        let mut bytes = vec![0; SCRIBE_BYTES as usize];
        let mut put = |number: u32| {
            let at = (number % SECTORS) as usize * SECTOR_BYTES;
            bytes[at..at + SECTOR_BYTES].copy_from_slice(&number.to_le_bytes().repeat(128));
            std::fs::write(&path, &bytes).unwrap();
            scribed(&path)
        };
        for number in 1..=300 {
            assert_eq!(put(number), Ok(number));
        }
        assert!(put(302).unwrap_err().contains("in the place of"));
        assert_eq!(put(301), Ok(302));
    }
}

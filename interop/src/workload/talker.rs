//! A boot sector that sends numbered Ethernet frames through an NE2000 at port 0x300.
//!
//! A frame is a broadcast, with type 0x88b5 followed by the number, little-endian. The number is in memory,
//! so a machine that takes over continues with the next one. A frame is due whenever bit 24 or a higher bit
//! of the time-stamp counter has changed: every few milliseconds.

use std::path::Path;

use crate::Failure;

/// Size of the image, padded to a size that every disk controller accepts.
const IMAGE_BYTES: usize = 1 << 20;

const LOADED: usize = 0x7c00;
// Offsets of the sector's tables after the code, and of its word. The next word is the counter at the last
// frame.
const SETUP: usize = 0x100;
const FILL: usize = 0x130;
const SEND: usize = 0x140;
const FRAME: usize = 0x150;
const NUMBER: usize = 0x1f0;

/// Physical address of a little-endian 32-bit word: the number of the last frame.
pub const NUMBER_ADDRESS: u64 = (LOADED + NUMBER) as u64;
/// Offset of the number in a frame.
pub const NUMBER_IN_FRAME: usize = 14;

const FRAME_BYTES: usize = 60;
/// Register and value of each write that resets the card and enables only transmission.
const SETUP_WRITES: [(u8, u8); 12] = [
    (0x0, 0x21),
    (0xe, 0x49),
    (0xa, 0),
    (0xb, 0),
    (0xc, 0x20),
    (0xd, 0),
    (0x1, 0x46),
    (0x3, 0x46),
    (0x2, 0x80),
    (0x7, 0xff),
    (0xf, 0),
    (0x0, 0x22),
];
/// Writes that announce bytes for the card's page 0x40.
const FILL_WRITES: [(u8, u8); 5] = [(0x8, 0), (0x9, 0x40), (0xa, FRAME_BYTES as u8), (0xb, 0), (0x0, 0x12)];
/// Writes that send the page.
const SEND_WRITES: [(u8, u8); 5] =
    [(0x0, 0x22), (0x4, 0x40), (0x5, FRAME_BYTES as u8), (0x6, 0), (0x0, 0x26)];

/// Arguments for a machine that boots the sector. The netdev of its card is called `n0`.
pub(super) fn arguments(directory: &Path) -> Result<Vec<String>, Failure> {
    let path = directory.join("talker.img");
    let mut image = vec![0; IMAGE_BYTES];
    image[..512].copy_from_slice(&sector());
    std::fs::write(&path, image).map_err(|error| format!("{}: {error}", path.display()))?;
    Ok(vec![
        "-drive".into(),
        // Read-only, because the guest has no disk of its own.
        format!("file={},format=raw,if=none,id=boot,readonly=on", path.display()),
        "-device".into(),
        "virtio-blk-pci,drive=boot,bootindex=0".into(),
        "-device".into(),
        "ne2k_isa,netdev=n0,iobase=0x300,id=talker".into(),
    ])
}

fn sector() -> [u8; 512] {
    let mut sector = [0; 512];
    const { assert!(CODE.len() <= SETUP) };
    let mut put = |at: usize, bytes: &[u8]| sector[at..at + bytes.len()].copy_from_slice(bytes);
    let table =
        |writes: &[(u8, u8)]| writes.iter().flat_map(|(port, value)| [*port, *value]).collect::<Vec<_>>();
    put(0, &CODE);
    put(SETUP, &table(&SETUP_WRITES));
    put(FILL, &table(&FILL_WRITES));
    put(SEND, &table(&SEND_WRITES));
    put(FRAME, &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x52, 0x54, 0, 0x12, 0x34, 0x56, 0x88, 0xb5]);
    put(510, &[0x55, 0xaa]);
    sector
}

/// 16-bit code as bytes: it is short, and uses the addresses of the constants above.
#[rustfmt::skip]
const CODE: [u8; 105] = [
    0xfa,                               // cli
    0xfc,                               // cld
    0x31, 0xc0,                         // xor ax, ax
    0x8e, 0xd8,                         // mov ds, ax
    0x8e, 0xc0,                         // mov es, ax
    0x8e, 0xd0,                         // mov ss, ax
    0xbc, 0x00, 0x7c,                   // mov sp, LOADED
    0xbe, 0x00, 0x7d,                   // mov si, LOADED + SETUP
    0xb9, 0x0c, 0x00,                   // mov cx, 12
    0x66, 0xe8, 0x44, 0x00, 0x00, 0x00, // call write
    0x0f, 0x31,                         // next: rdtsc
    0x66, 0x0f, 0xac, 0xd0, 0x18,       // shrd eax, edx, 24
    0x66, 0x3b, 0x06, 0xf4, 0x7d,       // cmp eax, [LOADED + LAST]
    0x74, 0xf2,                         // je next
    0x66, 0xa3, 0xf4, 0x7d,             // mov [LOADED + LAST], eax
    0x66, 0xff, 0x06, 0xf0, 0x7d,       // inc dword [LOADED + NUMBER]
    0x66, 0xa1, 0xf0, 0x7d,             // mov eax, [LOADED + NUMBER]
    0x66, 0xa3, 0x5e, 0x7d,             // mov [LOADED + FRAME + 14], eax
    0xbe, 0x30, 0x7d,                   // mov si, LOADED + FILL
    0xb9, 0x05, 0x00,                   // mov cx, 5
    0x66, 0xe8, 0x19, 0x00, 0x00, 0x00, // call write
    0xbe, 0x50, 0x7d,                   // mov si, LOADED + FRAME
    0xb9, 0x1e, 0x00,                   // mov cx, 30
    0xba, 0x10, 0x03,                   // mov dx, 0x310
    0xf3, 0x6f,                         // rep outsw
    0xbe, 0x40, 0x7d,                   // mov si, LOADED + SEND
    0xb9, 0x05, 0x00,                   // mov cx, 5
    0x66, 0xe8, 0x02, 0x00, 0x00, 0x00, // call write
    0xeb, 0xbc,                         // jmp next
    0xad,                               // write: lodsw; cx pairs of register and value from si on
    0x88, 0xc2,                         // mov dl, al
    0xb6, 0x03,                         // mov dh, 3
    0x88, 0xe0,                         // mov al, ah
    0xee,                               // out dx, al
    0xe2, 0xf6,                         // loop write
    0x66, 0xc3,                         // ret
];

//! The few FUSE requests that a file needs (linux/fuse.h), as bytes.

/// Inode of the root directory.
pub const ROOT: u64 = 1;
/// Length of the header before every answer's body, in bytes.
pub const OUT_HEADER: usize = 16;

pub const LOOKUP: u32 = 1;
pub const OPEN: u32 = 14;
pub const READ: u32 = 15;
pub const WRITE: u32 = 16;
pub const INIT: u32 = 26;

/// Flag to open for reading and writing.
const O_RDWR: u32 = 2;

/// A complete request with its header.
pub fn request(opcode: u32, unique: u64, inode: u64, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend((40 + body.len() as u32).to_le_bytes());
    bytes.extend(opcode.to_le_bytes());
    bytes.extend(unique.to_le_bytes());
    bytes.extend(inode.to_le_bytes());
    // User, group, process, extensions.
    bytes.extend([0; 16]);
    bytes.extend(body);
    bytes
}

/// Body of INIT: version 7.38, no capabilities.
pub fn init() -> Vec<u8> {
    let mut bytes: Vec<u8> = [7u32, 38, 0, 0].iter().flat_map(|word| word.to_le_bytes()).collect();
    bytes.resize(64, 0);
    bytes
}

pub fn name(name: &str) -> Vec<u8> {
    [name.as_bytes(), &[0]].concat()
}

pub fn open() -> Vec<u8> {
    [O_RDWR.to_le_bytes(), [0; 4]].concat()
}

/// Body of READ. For WRITE, the data follows it.
pub fn place(handle: u64, offset: u64, len: u32) -> Vec<u8> {
    let mut bytes = [handle.to_le_bytes(), offset.to_le_bytes()].concat();
    bytes.extend(len.to_le_bytes());
    bytes.resize(40, 0);
    bytes
}

/// The body of an answer.
///
/// # Panics
/// If the answer is not to request `unique`, or reports a failure.
pub fn answer(bytes: &[u8], unique: u64) -> &[u8] {
    let len = u32::from_le_bytes(bytes[0..4].try_into().expect("four bytes")) as usize;
    let error = i32::from_le_bytes(bytes[4..8].try_into().expect("four bytes"));
    assert_eq!(word(bytes, 8), unique, "an answer to another request");
    assert_eq!(error, 0, "{}", std::io::Error::from_raw_os_error(-error));
    &bytes[OUT_HEADER..len]
}

pub fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

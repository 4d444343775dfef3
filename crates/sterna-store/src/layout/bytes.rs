//! Little-endian fields.

/// A broken rule: the clause, and its paragraph in `specs/image.md`.
pub(crate) type Rule = (String, &'static str);

/// Reads fields of a section that may end anywhere.
pub(crate) struct Fields<'a> {
    rest: &'a [u8],
    what: &'static str,
}

impl<'a> Fields<'a> {
    pub(crate) fn new(rest: &'a [u8], what: &'static str) -> Self {
        Self { rest, what }
    }

    pub(crate) fn bytes(&mut self, count: usize) -> Result<&'a [u8], Rule> {
        let Some((head, rest)) = self.rest.split_at_checked(count) else {
            return Err((format!("{} ends inside a field", self.what), "§4"));
        };
        self.rest = rest;
        Ok(head)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Result<[u8; N], Rule> {
        let mut array = [0; N];
        array.copy_from_slice(self.bytes(N)?);
        Ok(array)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, Rule> {
        Ok(self.array::<1>()?[0])
    }

    pub(crate) fn u16(&mut self) -> Result<u16, Rule> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Rule> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Rule> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// A text with its length in 16 bits before it.
    pub(crate) fn text(&mut self) -> Result<String, Rule> {
        let length = usize::from(self.u16()?);
        let bytes = self.bytes(length)?.to_vec();
        String::from_utf8(bytes).map_err(|_| (format!("a text in {} is not UTF-8", self.what), "§4"))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    pub(crate) fn end(self) -> Result<(), Rule> {
        match self.rest.len() {
            0 => Ok(()),
            more => Err((format!("{} has {more} bytes too many", self.what), "§4")),
        }
    }
}

/// Appends a text, at most 65535 bytes of it, with its length.
pub(crate) fn put_text(out: &mut Vec<u8>, text: &str) {
    let mut length = text.len().min(usize::from(u16::MAX));
    while !text.is_char_boundary(length) {
        length -= 1;
    }
    out.extend_from_slice(&(length as u16).to_le_bytes());
    out.extend_from_slice(&text.as_bytes()[..length]);
}

/// Appends a number in groups of seven bits, the lowest first.
pub(crate) fn put_number(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

/// Reads what [`put_number`] wrote.
pub(crate) fn number(fields: &mut Fields<'_>) -> Result<u64, Rule> {
    let mut number = 0u64;
    for shift in (0..64).step_by(7) {
        let byte = fields.u8()?;
        let part = u64::from(byte & 0x7f);
        if shift == 63 && part > 1 {
            break;
        }
        number |= part << shift;
        if byte & 0x80 == 0 {
            return Ok(number);
        }
    }
    Err(("a number has more than 64 bits".to_owned(), "§6"))
}

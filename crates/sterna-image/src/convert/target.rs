//! What an image can become, by name.

use std::fmt;
use std::str::FromStr;

use crate::model::{Compression, Container, Form, ImageKind};

/// A kind of image, without the texts of its container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Target {
    is_libvirt: bool,
    form: Form,
    compression: Compression,
}

impl Target {
    /// A stream without a container. mapped-ram is never compressed.
    pub fn bare(form: Form, compression: Compression) -> Self {
        Self { is_libvirt: false, form, compression: compress(form, compression) }
    }

    /// A libvirt save image; with [`Form::Mapped`] its format *sparse*.
    pub fn libvirt(form: Form, compression: Compression) -> Self {
        Self { is_libvirt: true, form, compression: compress(form, compression) }
    }

    /// mapped-ram, in the container that the source has.
    pub fn default_for(kind: &ImageKind) -> Self {
        match kind.container {
            Container::Bare => Self::bare(Form::Mapped, Compression::None),
            Container::Libvirt(_) => Self::libvirt(Form::Mapped, Compression::None),
        }
    }

    /// All of them.
    pub fn all() -> Vec<Self> {
        let legacy = |make: fn(Form, Compression) -> Self| {
            Compression::ALL.map(|compression| make(Form::Legacy, compression))
        };
        let mapped = |make: fn(Form, Compression) -> Self| [make(Form::Mapped, Compression::None)];
        [&mapped(Self::bare)[..], &legacy(Self::bare), &mapped(Self::libvirt), &legacy(Self::libvirt)]
            .concat()
    }

    /// Whether it is in libvirt's container.
    pub fn is_libvirt(self) -> bool {
        self.is_libvirt
    }

    /// Where its pages are.
    pub fn form(self) -> Form {
        self.form
    }

    /// How its stream is compressed.
    pub fn compression(self) -> Compression {
        self.compression
    }

    /// Its name, as [`ImageKind::name`] has it.
    pub fn name(self) -> String {
        match (self.is_libvirt, self.form, self.compression) {
            (false, Form::Mapped, _) => "mapped-ram".to_owned(),
            (false, Form::Legacy, Compression::None) => "legacy".to_owned(),
            (false, Form::Legacy, compression) => format!("legacy-{}", compression.name()),
            (true, Form::Mapped, _) => "libvirt-sparse".to_owned(),
            (true, Form::Legacy, compression) => format!("libvirt-{}", compression.name()),
        }
    }
}

fn compress(form: Form, compression: Compression) -> Compression {
    if form == Form::Mapped { Compression::None } else { compression }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::all().into_iter().find(|target| target.name() == text).ok_or_else(|| {
            let names: Vec<String> = Self::all().into_iter().map(Self::name).collect();
            format!("{text:?} is not a format; formats are {}", names.join(", "))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn from_str_of_every_name_gives_its_target() {
        let all = Target::all();
        assert_eq!(all.len(), 14);
        for target in all {
            assert_eq!(target.name().parse(), Ok(target));
        }
        assert!("raw".parse::<Target>().unwrap_err().contains("libvirt-raw"));
    }
}

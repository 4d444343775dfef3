//! What an image can become, by name.

use std::fmt;
use std::str::FromStr;

use crate::model::{Container, Form, ImageKind, Packing};

/// A kind of image, without the texts of its container.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Target {
    is_libvirt: bool,
    form: Form,
    packing: Packing,
}

/// Packings by name.
const PACKINGS: [Packing; 6] =
    [Packing::None, Packing::Gzip, Packing::Bzip2, Packing::Xz, Packing::Lzop, Packing::Zstd];

impl Target {
    /// A stream without a container. mapped-ram is never packed.
    pub fn bare(form: Form, packing: Packing) -> Self {
        Self { is_libvirt: false, form, packing: pack(form, packing) }
    }

    /// A libvirt save image; with [`Form::Mapped`] its format *sparse*.
    pub fn libvirt(form: Form, packing: Packing) -> Self {
        Self { is_libvirt: true, form, packing: pack(form, packing) }
    }

    /// mapped-ram, in the container that the source has.
    pub fn default_for(kind: &ImageKind) -> Self {
        match kind.container {
            Container::Bare => Self::bare(Form::Mapped, Packing::None),
            Container::Libvirt(_) => Self::libvirt(Form::Mapped, Packing::None),
        }
    }

    /// All of them.
    pub fn all() -> Vec<Self> {
        let legacy = |make: fn(Form, Packing) -> Self| PACKINGS.map(|packing| make(Form::Legacy, packing));
        let mapped = |make: fn(Form, Packing) -> Self| [make(Form::Mapped, Packing::None)];
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

    /// How its stream is packed.
    pub fn packing(self) -> Packing {
        self.packing
    }

    /// Its name, as [`ImageKind::name`] has it.
    pub fn name(self) -> String {
        match (self.is_libvirt, self.form, self.packing) {
            (false, Form::Mapped, _) => "mapped-ram".to_owned(),
            (false, Form::Legacy, Packing::None) => "legacy".to_owned(),
            (false, Form::Legacy, packing) => format!("legacy-{}", packing.name()),
            (true, Form::Mapped, _) => "libvirt-sparse".to_owned(),
            (true, Form::Legacy, packing) => format!("libvirt-{}", packing.name()),
        }
    }
}

fn pack(form: Form, packing: Packing) -> Packing {
    if form == Form::Mapped { Packing::None } else { packing }
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

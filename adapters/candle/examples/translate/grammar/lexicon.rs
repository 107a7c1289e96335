//! Words of the grammar: tables, a word a line, read when the program starts. A dash stands for nothing.

use std::fmt::Debug;

/// Grammatical gender, of French.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Gender {
    Masculine,
    Feminine,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Number {
    Singular,
    Plural,
}

/// Form of a verb. Nouns have that of `It` or of `They`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Person {
    I,
    It,
    We,
    You,
    They,
}

/// Kind of thing that a noun names, by which adjectives and verbs choose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Being,
    Thing,
    Place,
}

/// A form for one, and a form for many.
pub(crate) type Forms = [&'static str; 2];

#[derive(Debug)]
pub(crate) struct Noun {
    pub(crate) english: Forms,
    pub(crate) french: Forms,
    pub(crate) gender: Gender,
    pub(crate) kind: Kind,
}

/// Place of an adjective beside its noun, in French. In English it stands before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    Before,
    After,
}

#[derive(Debug)]
pub(crate) struct Adjective {
    pub(crate) english: &'static str,
    /// Masculine forms.
    masculine: Forms,
    /// Feminine forms.
    feminine: Forms,
    /// Masculine, before a vowel.
    before_vowel: &'static str,
    pub(crate) place: Place,
    /// Letters of the kinds of nouns that it goes with.
    kinds: &'static str,
}

#[derive(Debug)]
pub(crate) struct Verb {
    /// Plain form, and that of the third person.
    pub(crate) english: Forms,
    pub(crate) infinitive: &'static str,
    /// By person, in the order of [`Person`].
    present: [&'static str; 5],
    /// Words after the verb, in either language: "to", "à".
    pub(crate) after: [&'static str; 2],
}

impl Adjective {
    /// French form, before a vowel or not.
    pub(crate) fn french(&self, gender: Gender, number: Number, vowel: bool) -> &'static str {
        match (gender, number) {
            (Gender::Masculine, Number::Singular) if vowel => self.before_vowel,
            (Gender::Masculine, number) => self.masculine[number as usize],
            (Gender::Feminine, number) => self.feminine[number as usize],
        }
    }

    pub(crate) fn goes_with(&self, kind: Kind) -> bool {
        self.kinds.contains(['b', 't', 'p'][kind as usize])
    }
}

impl Verb {
    pub(crate) fn french(&self, person: Person) -> &'static str {
        self.present[person as usize]
    }

    pub(crate) fn english(&self, person: Person) -> &'static str {
        self.english[usize::from(person == Person::It)]
    }

    /// True of "can" and "must", which are negated without "do" and have no "to".
    pub(crate) fn is_auxiliary(&self) -> bool {
        self.english[0] == self.english[1]
    }
}

/// Word before a noun.
#[derive(Debug)]
pub(crate) struct Determiner {
    pub(crate) english: Forms,
    masculine: Forms,
    feminine: Forms,
    /// Before a vowel, by gender.
    before_vowel: Forms,
}

impl Determiner {
    /// French form, before a vowel or not.
    pub(crate) fn french(&self, gender: Gender, number: Number, vowel: bool) -> &'static str {
        match (number, gender) {
            (Number::Singular, _) if vowel => self.before_vowel[gender as usize],
            (_, Gender::Masculine) => self.masculine[number as usize],
            (_, Gender::Feminine) => self.feminine[number as usize],
        }
    }
}

/// Tables that have been read.
#[derive(Debug)]
pub(crate) struct Lexicon {
    pub(crate) nouns: Vec<Noun>,
    pub(crate) adjectives: Vec<Adjective>,
    pub(crate) determiners: Vec<Determiner>,
    /// Verbs with an object.
    pub(crate) transitive: Vec<Verb>,
    /// Verbs with none.
    pub(crate) intransitive: Vec<Verb>,
    /// Verbs with a place.
    pub(crate) motion: Vec<Verb>,
    /// Verbs with an infinitive.
    pub(crate) modal: Vec<Verb>,
}

impl Lexicon {
    pub(crate) fn new() -> Self {
        Self {
            nouns: NOUNS.lines().map(noun).collect(),
            adjectives: ADJECTIVES.lines().map(adjective).collect(),
            determiners: DETERMINERS.lines().map(determiner).collect(),
            transitive: TRANSITIVE.lines().map(verb).collect(),
            intransitive: INTRANSITIVE.lines().map(verb).collect(),
            motion: MOTION.lines().map(verb).collect(),
            modal: MODAL.lines().map(verb).collect(),
        }
    }
}

/// Words of a line of a table, as many as it must have; "" for a dash.
fn words<const N: usize>(line: &'static str) -> [&'static str; N] {
    let words: Vec<_> = line.split_whitespace().map(|word| if word == "-" { "" } else { word }).collect();
    words.try_into().unwrap_or_else(|_| panic!("{line}: must have {N} words"))
}

fn noun(line: &'static str) -> Noun {
    let [one, many, un, des, gender, kind] = words(line);
    let gender = if gender == "f" { Gender::Feminine } else { Gender::Masculine };
    let kind = match kind {
        "b" => Kind::Being,
        "t" => Kind::Thing,
        _ => Kind::Place,
    };
    Noun { english: [one, many], french: [un, des], gender, kind }
}

fn adjective(line: &'static str) -> Adjective {
    let [english, m, f, ms, fs, vowel, place, kinds] = words(line);
    let place = if place == "before" { Place::Before } else { Place::After };
    let before_vowel = if vowel.is_empty() { m } else { vowel };
    Adjective { english, masculine: [m, ms], feminine: [f, fs], before_vowel, place, kinds }
}

fn determiner(line: &'static str) -> Determiner {
    let [one, many, m, f, m_vowel, f_vowel, plural] = words(line);
    let before_vowel = [m_vowel, f_vowel];
    Determiner { english: [one, many], masculine: [m, plural], feminine: [f, plural], before_vowel }
}

fn verb(line: &'static str) -> Verb {
    let [plain, third, to, infinitive, je, il, nous, vous, ils, after] = words(line);
    let third = if third.is_empty() { plain } else { third };
    Verb { english: [plain, third], infinitive, present: [je, il, nous, vous, ils], after: [to, after] }
}

/// English one and many, French one and many, gender, kind (being, thing, place).
const NOUNS: &str = "\
man men homme hommes m b
woman women femme femmes f b
boy boys garçon garçons m b
girl girls fille filles f b
child children enfant enfants m b
brother brothers frère frères m b
sister sisters sœur sœurs f b
friend friends ami amis m b
teacher teachers professeur professeurs m b
doctor doctors médecin médecins m b
neighbour neighbours voisin voisins m b
cat cats chat chats m b
dog dogs chien chiens m b
bird birds oiseau oiseaux m b
horse horses cheval chevaux m b
cow cows vache vaches f b
book books livre livres m t
car cars voiture voitures f t
apple apples pomme pommes f t
flower flowers fleur fleurs f t
letter letters lettre lettres f t
hat hats chapeau chapeaux m t
shoe shoes chaussure chaussures f t
table tables table tables f t
picture pictures image images f t
orange oranges orange oranges f t
egg eggs œuf œufs m t
umbrella umbrellas parapluie parapluies m t
bicycle bicycles vélo vélos m t
shirt shirts chemise chemises f t
cake cakes gâteau gâteaux m t
newspaper newspapers journal journaux m t
key keys clé clés f t
bag bags sac sacs m t
dress dresses robe robes f t
tree trees arbre arbres m t
coat coats manteau manteaux m t
house houses maison maisons f p
park parks parc parcs m p
school schools école écoles f p
beach beaches plage plages f p
market markets marché marchés m p
station stations gare gares f p
garden gardens jardin jardins m p
church churches église églises f p
hotel hotels hôtel hôtels m p
library libraries bibliothèque bibliothèques f p
museum museums musée musées m p
cinema cinemas cinéma cinémas m p
shop shops magasin magasins m p
village villages village villages m p
office offices bureau bureaux m p
hospital hospitals hôpital hôpitaux m p
university universities université universités f p";

/// English; French masculine, feminine, and both for many; masculine before a vowel; place; kinds of nouns.
const ADJECTIVES: &str = "\
red rouge rouge rouges rouges - after t
green vert verte verts vertes - after t
black noir noire noirs noires - after bt
white blanc blanche blancs blanches - after bt
blue bleu bleue bleus bleues - after t
yellow jaune jaune jaunes jaunes - after t
cold froid froide froids froides - after p
light léger légère légers légères - after t
heavy lourd lourde lourds lourdes - after t
expensive cher chère chers chères - after tp
french français française français françaises - after btp
famous célèbre célèbre célèbres célèbres - after bp
strange étrange étrange étranges étranges - after btp
clean propre propre propres propres - after tp
dirty sale sale sales sales - after tp
empty vide vide vides vides - after p
quiet calme calme calmes calmes - after bp
modern moderne moderne modernes modernes - after tp
happy heureux heureuse heureux heureuses - after b
sad triste triste tristes tristes - after b
tired fatigué fatiguée fatigués fatiguées - after b
intelligent intelligent intelligente intelligents intelligentes - after b
rich riche riche riches riches - after b
strong fort forte forts fortes - after b
small petit petite petits petites - before btp
big grand grande grands grandes - before btp
pretty joli jolie jolis jolies - before btp
bad mauvais mauvaise mauvais mauvaises - before btp
good bon bonne bons bonnes - before bt
beautiful beau belle beaux belles bel before btp
old vieux vieille vieux vieilles vieil before btp
young jeune jeune jeunes jeunes - before b";

/// English one and many; French masculine, feminine, both before a vowel, and both for many.
const DETERMINERS: &str = "\
the the le la le la les
a - un une un une -
my my mon ma mon mon mes
your your votre votre votre votre vos
his his son sa son son ses
her her son sa son son ses
our our notre notre notre notre nos
their their leur leur leur leur leurs
this these ce cette cet cette ces";

/// English plain and third person, and the word after; French infinitive, five persons, and the word after.
const TRANSITIVE: &str = "\
see sees - voir vois voit voyons voyez voient -
buy buys - acheter achète achète achetons achetez achètent -
have has - avoir ai a avons avez ont -
want wants - vouloir veux veut voulons voulez veulent -
like likes - aimer aime aime aimons aimez aiment -
take takes - prendre prends prend prenons prenez prennent -
find finds - trouver trouve trouve trouvons trouvez trouvent -
draw draws - dessiner dessine dessine dessinons dessinez dessinent -
paint paints - peindre peins peint peignons peignez peignent -
sell sells - vendre vends vend vendons vendez vendent -
hide hides - cacher cache cache cachons cachez cachent -
bring brings - apporter apporte apporte apportons apportez apportent -
choose chooses - choisir choisis choisit choisissons choisissez choisissent -
forget forgets - oublier oublie oublie oublions oubliez oublient -
wash washes - laver lave lave lavons lavez lavent -
lose loses - perdre perds perd perdons perdez perdent -
look looks for chercher cherche cherche cherchons cherchez cherchent -";

const INTRANSITIVE: &str = "\
play plays - jouer joue joue jouons jouez jouent -
sleep sleeps - dormir dors dort dormons dormez dorment -
eat eats - manger mange mange mangeons mangez mangent -
sing sings - chanter chante chante chantons chantez chantent -
swim swims - nager nage nage nageons nagez nagent -
read reads - lire lis lit lisons lisez lisent -
work works - travailler travaille travaille travaillons travaillez travaillent -
dance dances - danser danse danse dansons dansez dansent -
walk walks - marcher marche marche marchons marchez marchent -
write writes - écrire écris écrit écrivons écrivez écrivent -
study studies - étudier étudie étudie étudions étudiez étudient -
run runs - courir cours court courons courez courent -
talk talks - parler parle parle parlons parlez parlent -
wait waits - attendre attends attend attendons attendez attendent -";

const MOTION: &str = "\
go goes to aller vais va allons allez vont à
come comes from venir viens vient venons venez viennent de
play plays in jouer joue joue jouons jouez jouent dans
sleep sleeps in dormir dors dort dormons dormez dorment dans
work works in travailler travaille travaille travaillons travaillez travaillent dans
walk walks in marcher marche marche marchons marchez marchent dans
live lives in habiter habite habite habitons habitez habitent dans";

const MODAL: &str = "\
like likes to aimer aime aime aimons aimez aiment -
love loves to adorer adore adore adorons adorez adorent -
want wants to vouloir veux veut voulons voulez veulent -
hope hopes to espérer espère espère espérons espérez espèrent -
hate hates to détester déteste déteste détestons détestez détestent -
can can - pouvoir peux peut pouvons pouvez peuvent -
must must - devoir dois doit devons devez doivent -";
